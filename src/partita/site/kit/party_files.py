"""The files of a group: for the server and for each site, all that it needs but its keys.

Equal inputs give equal files. Nothing here is secret.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from glob import escape
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from partita.core.dp_settings import PrivacySettings
from partita.core.given import origin
from partita.experiment import flower_app
from partita.experiment.builder import build
from partita.experiment.config import Config, load
from partita.experiment.config_code import code_copies
from partita.experiment.experiment import Experiment
from partita.site.kit.group import ABSOLUTE, SERVER, Group, GroupSite, Images, is_absolute, reads_path
from partita.site.kit.plan_needs import Needs, by_role, needs_of
from partita.site.kit.requirements import EXTRAS, ROOT, requirements
from partita.site.kit.templating import render_folder
from partita.site.toml_tables import SiteError
from partita.storage.atomic_files import write

UID = 10001  # of the user in containers and of services: no right of any other user applies to it
VENV = "/opt/partita/venv"
ENVIRONMENT = {  # nothing is sent to others, and nothing is fetched from them
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
BODY = 2**24  # bytes of a message besides its tensors
EXPERIMENT = "experiment.toml"
MIN_CLIENTS = 3  # least number of sites in a secure sum, if the experiment names none: of two, each knows the other

Files = dict[str, bytes]


def group_files(group: Group) -> Files:
    """Return all files of a group by their paths.

    Raises:
        SiteError: If the group and its experiment do not fit.
    """
    config = load_experiment(group)
    experiment = build(config)
    needs = needs_of(experiment.run, experiment.model, experiment.federation.clients)
    recorded = {EXPERIMENT: config.to_toml().encode(), **code_copies(config.references())}
    common = _common(group, config)
    shared = {
        **_below("image", image_files(group.images)),
        **recorded,
    }
    app = _below("app", _app(group, recorded))
    found = _below(SERVER, {**_server(group, config, needs.values(), common), **app, **shared})
    for site in group.site:
        found |= _below(site.name, {**_site(site, experiment, needs[site.name], common), **shared})
    return found


def image_files(images: Images) -> Files:
    """Return what installs partita as it is installed here: versions, scripts and Dockerfile.

    Args:
        images: The container images; only the base image is used.

    Raises:
        SiteError: If something that a site may need is not installed here.
    """
    files = render_folder("image", {"base": images.pinned("base"), "uid": UID, "extras": EXTRAS})
    return {**files, "requirements.txt": requirements().encode()}


def load_experiment(group: Group) -> Config:
    """Return the experiment of a group. Its `data.path` is the server's, as an absolute path.

    Raises:
        SiteError: If the experiment is not one of exactly these sites, or its data is not where containers can see it.
    """
    config = load(group.experiment_file)
    group.check_experiment(config)
    path = config.data.get("path")
    if path is None or "data" in config.objects:
        return config
    found = group.server.data or (str(Path(path).resolve()) if Path(path).exists() else str(path))
    if os.path.isabs(found) and not is_absolute(found):
        raise SiteError(f"the server's data is in '{found}'; move it and set server.data: {ABSOLUTE}")
    return replace(config, data={**config.data, "path": found})


def open_points(group: Group) -> list[str]:
    """Return what is still to be filled in or provided before the group can run, one sentence each."""
    points, model = group.open_points(), origin(load(group.experiment_file).model.get("path"))
    if model and not is_absolute(model):
        points.append(
            f"the model is from '{model}': sites have no way to the Hub, so save the model to a folder and name it by "
            "its absolute path, the same at all parties"
        )
    return points


def _below(folder: str, files: Mapping[str, bytes]) -> Files:
    return {f"{folder}/{path}": content for path, content in files.items()}


def _common(group: Group, config: Config) -> dict[str, Any]:
    return {
        "group": group,
        "server": group.server,
        "images": {key: group.images.pinned(key) for key in ("partita", "nginx")},
        "pinned": bool(group.images.partita),
        "environment": ENVIRONMENT,
        "uid": UID,
        "venv": VENV,
        "version": version(ROOT),
        "code": dict(config.code),
    }


def _app(group: Group, recorded: Files) -> Files:
    """Return the Flower app of the server."""
    with TemporaryDirectory() as folder:
        for name, content in recorded.items():
            write(Path(folder, "config", name), content, sync=False)
        runs = Path(group.server.folder, "state", "runs")
        app = flower_app.init(Path(folder, "app"), Path(folder, "config", EXPERIMENT), runs=runs)
        return {str(path.relative_to(app)): path.read_bytes() for path in sorted(app.rglob("*")) if path.is_file()}


def _server(group: Group, config: Config, needs: Iterable[Needs], common: Mapping[str, Any]) -> Files:
    values = {
        **_places(config, group.server.data or config.data.get("path"), group.server.folder),
        "bridge": f"pt-{SERVER}",
        "addresses": _by_family(ip for site in group.site for ip in site.ips),
        "gpu": config.engine.device == "cuda",
        "max_body": 2 * max(each.bytes_per_round for each in needs) + BODY,
    }
    return render_folder(SERVER, {**common, **values})


def _site(site: GroupSite, experiment: Experiment, needs: Needs, common: Mapping[str, Any]) -> Files:
    config = experiment.config
    roles, names = by_role(experiment.model, needs.names)
    secure = tomllib.loads(config.to_toml()).get("secure_aggregation")
    values = {
        **_places(config, site.data, site.home),
        "site": site,
        "changes": {**({"data.path": site.data} if reads_path(config) else {}), **site.set},
        "bridge": f"pt-{site.name[:12]}",
        "addresses": _by_family(common["server"].addresses),
        "gpu": site.set.get("engine.device", config.engine.device) == "cuda",
        "roles": roles,
        "names": names,
        "never": [escape(name) for name in sorted(needs.kept - needs.names)],
        "scores": bool(config.evaluate.personal_every or config.validation_every),
        "privacy": _noise_at_site(experiment, secure is not None),
        "secure_aggregation": None if secure is None else secure.get("min_clients", MIN_CLIENTS),
        **_limits(site, needs, config.rounds),
    }
    return render_folder("site", {**common, **values})


def _noise_at_site(experiment: Experiment, secure: bool) -> PrivacySettings | None:
    """Return the privacy settings if noise is added at a site; None if the server adds it, which no site can check."""
    config = experiment.guard and experiment.guard.privacy
    return config if config and (secure or config.unit != "client") else None


def _limits(site: GroupSite, needs: Needs, rounds: int) -> dict[str, int]:
    """Return the limits of a site's policy.

    Raises:
        SiteError: If a limit of the group is below what the plan needs.
    """
    found = {"bytes_per_round": needs.bytes_per_round, "bytes_total": needs.bytes_total, "rounds": rounds}
    for key, needed in found.items():
        given = getattr(site.limits, key)
        if given is not None and given < needed:
            raise SiteError(
                f"the site '{site.name}' has limits.{key} = {given}, but the plan needs {needed}; raise it, or change "
                "the experiment"
            )
        found[key] = given or needed
    return found


def _places(config: Config, data: str | None, home: str) -> dict[str, Any]:
    """Return the paths that a party only reads, and whether any is in a home folder."""
    wanted = (data, origin(config.model.get("path")))
    paths = [path for path in dict.fromkeys(wanted) if isinstance(path, str) and is_absolute(path)]
    return {"read": paths, "read_home": any(path.startswith(("/home/", "/root/")) for path in (*paths, home))}


def _by_family(addresses: Iterable[str]) -> dict[str, list[str]]:
    """Return addresses and networks by the name that nftables has for their kind."""
    found: dict[str, list[str]] = {"ip": [], "ip6": []}
    for text in dict.fromkeys(addresses):
        found["ip" if ipaddress.ip_network(text).version == 4 else "ip6"].append(text)
    return found
