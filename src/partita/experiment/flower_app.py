"""A run as a Flower app. The experiment's config ships with the app; each site adds the location of its own data."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from partita import data, models
from partita.core.client import Job
from partita.core.own_code import load_module
from partita.core.rng import Key
from partita.core.rounds import initial_server
from partita.data.digest import examples_digest
from partita.engines.flower.client import client_app
from partita.engines.flower.server import FlowerEngine, server_app
from partita.engines.flower.site import Site
from partita.experiment import run_folder
from partita.experiment.builder import build, client_names, new_secret
from partita.experiment.config import SITES_OWN, Config, differences, load, load_recorded, shared_digest
from partita.experiment.config_code import code_copies, references_in
from partita.experiment.config_tables import TrackConfig
from partita.experiment.experiment import Experiment
from partita.experiment.gc_freeze import importing
from partita.experiment.round_log import Row
from partita.experiment.run_ledger import open_ledger
from partita.experiment.run_names import default_folder
from partita.experiment.runner import prepare, restore, restore_secret, run_rounds
from partita.privacy.secret import load_or_save
from partita.record import file_names
from partita.storage.atomic_files import write
from partita.storage.client_store import MemoryStore
from partita.storage.safe_text import label_folder, path_component, printable

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

SITE_OPTIONS = tuple(f"{table}." for table in SITES_OWN)
LIBRARIES = ("datasets", "transformers", "peft", "trl")  # those of named objects, which take seconds to import
PACKAGE, CONFIG = "federation", "experiment.toml"
APP_SOURCE = """from pathlib import Path

from partita.experiment.flower_app import {side}

app = {side}(Path(__file__).with_name("experiment.toml"))
"""


class FlowerError(ValueError):
    """An invalid app, node config or run config."""


def init(
    folder: Path, config: Path, changes: Iterable[str] = (), clients: int | None = None, runs: Path | None = None
) -> Path:
    """Write a Flower app: the config with all defaults, and a short module for the server and for the clients.

    Args:
        folder: The app's folder.
        config: The experiment's config file.
        changes: Overrides such as "method.mu=0.1".
        clients: Number of clients to wait for. Default: all clients of the split.
        runs: The folder on the server that holds runs. Default: `runs` in the current folder.

    Raises:
        FlowerError: If the folder already holds a project.
    """
    if (folder / "pyproject.toml").exists():
        raise FlowerError(f"{folder} already holds a pyproject.toml; choose another folder, or delete that file")
    settings = load(config, changes)
    population = build(settings).federation.clients
    record = default_folder(settings.label, settings.seed)
    runs = runs or record.parent.resolve()
    app = {
        "publisher": "partita",
        "components": {"serverapp": f"{PACKAGE}.server_app:app", "clientapp": f"{PACKAGE}.client_app:app"},
        "config": {
            "clients": clients or len(population),
            "deadline": 600.0,
            "patience": math.inf,
            # Not the folder of 'partita run', which may hold a run of the same config already.
            "folder": str(runs / f"{record.name}-flower"),
            "sites": str(runs / "sites"),
            "set": "",
        },
    }
    project = {
        "name": folder.resolve().name,
        "version": "1.0.0",
        "description": f"partita: {settings.label}",
        "license": "Apache-2.0",
    }
    write(folder / "pyproject.toml", tomli_w.dumps({"project": project, "tool": {"flwr": {"app": app}}}).encode())
    write(folder / PACKAGE / CONFIG, settings.to_toml().encode())
    for name, text in code_copies(settings.references()).items():
        write(folder / PACKAGE / name, text)
    write(folder / PACKAGE / "__init__.py", b"")
    for side in ("client", "server"):
        write(folder / PACKAGE / f"{side}_app.py", APP_SOURCE.format(side=side).encode())
    return folder


def population(app: Path) -> Sequence[str]:
    """Return the names of an app's clients."""
    return client_names(load(app / PACKAGE / CONFIG))


def modules(app: Path) -> list[str]:
    """Return the modules that an app's processes import at startup."""
    return modules_of(load(app / PACKAGE / CONFIG))


def modules_of(config: Config) -> list[str]:
    """Return the modules of partita that an experiment needs, this one, and those that its files of objects name."""
    entries = data.INDEX.get(config.data["name"]), models.INDEX.get(config.model["name"])
    files = [load_module(each) for each in references_in(config.objects)]
    places = {str(getattr(value, "__module__", "")) for file in files for value in vars(file).values()}
    libraries = [place for place in sorted(places | {"datasets"}) if place.partition(".")[0] in LIBRARIES]
    return [__name__, *(entry.partition(":")[0] for entry in entries if entry), *(libraries if files else ())]


def run_config(app: Path) -> Mapping[str, Any]:
    """Return the app's run config, before the changes of `--run-config`."""
    project = tomllib.loads((app / "pyproject.toml").read_text())
    config: Mapping[str, Any] = project["tool"]["flwr"]["app"]["config"]
    return config


def check_run_folder(app: Path, folder: Path) -> None:
    """Check on the server's machine that a run of the app can start or continue in this folder.

    Raises:
        RunFolderError: If the folder holds a finished run, or a run of another config.
    """
    if not (folder / file_names.CONFIG).exists():
        return
    remedy = f"choose another run folder: --out {shlex.quote(str(_free_folder(folder)))}"
    run_folder.verify(folder)
    _check_same(_settings(app / PACKAGE / CONFIG, run_config(app)), folder, remedy)
    if run_folder.finished(folder):
        raise run_folder.RunFolderError(f"{folder} holds a finished run of this app; {remedy}")


def client(config: Path) -> ClientApp:
    """Create a site's app. The node config holds the client's name, its folder and the location of its data."""
    return client_app(lambda context: _name(context, config), lambda context: _site(context, config))


def server(config: Path) -> ServerApp:
    """Create the server's app. The run config holds the run folder and the number of clients to wait for."""

    def main(grid: Grid, context: Context) -> None:
        for row in serve(grid, _settings(config, context.run_config), context.run_config, str(context.run_id)):
            print(_line(row), flush=True)
        if early := run_folder.stopped(Path(str(context.run_config["folder"]))):
            print(early, flush=True)

    return server_app(main)


def serve(grid: Grid, config: Config, settings: Mapping[str, Any], session: str) -> Iterator[Row]:
    """Start the run, or resume the one in the run folder, and yield one row per round.

    Args:
        grid: Flower's connection to the nodes.
        config: The experiment.
        settings: Flower's run config: "folder", "deadline", "clients" and optionally "patience".
        session: Id that is unique to this start of the server.

    Raises:
        FlowerError: If a setting is missing.
        RunFolderError: If the folder holds a run with another config.
    """
    folder = Path(str(_required(settings, "folder", "run config")))
    config = replace(config, engine=replace(config.engine, clients_per_block=1))
    started = (folder / file_names.CONFIG).exists()
    experiment = build(config, restore_secret(config, folder) if started else new_secret(config))
    if experiment.make_engine is not None:
        experiment = replace(experiment, tester=experiment.make_engine(experiment, MemoryStore()))
    with run_folder.lock(folder):
        done, server = 0, initial_server(experiment.run, experiment.model)
        if started:
            run_folder.verify(folder)
            value = shlex.quote(f"folder={json.dumps(str(_free_folder(folder)), ensure_ascii=False)}")
            _check_same(config, folder, f"choose another run folder: flwr run ... --run-config {value}")
            done, server = restore(experiment, folder)
            # Sites may already have run rounds after this checkpoint, so the record of what they hold is outdated.
            server = replace(server, versions=replace(server.versions, held={}))
        else:
            prepare(experiment, folder)
        engine = FlowerEngine(
            experiment.run,
            experiment.model,
            experiment.federation.clients,
            grid,
            session,
            start=done,
            deadline=float(_required(settings, "deadline", "run config")),
            wait_for=int(_required(settings, "clients", "run config")),
            device=experiment.device,
            patience=float(settings.get("patience", math.inf)),
            config=shared_digest(config),
            base=experiment.base_digest,
            evaluator=experiment.evaluator,
        )
        yield from run_rounds(
            experiment, folder, engine, engine.store, server, done, connected=lambda: engine.connected
        )


def _name(context: Context, config: Path) -> str:
    """Return the client's name. Flower's simulation numbers its nodes instead of naming them."""
    if "partition-id" in context.node_config and "client" not in context.node_config:
        clients = client_names(_settings(config, context.run_config))
        return clients[int(context.node_config["partition-id"])]
    return str(_required(context.node_config, "client", "node config"))


def _site(context: Context, config: Path) -> Site:
    name, node, changes = _name(context, config), context.node_config, shlex.split(_set(context.run_config))
    own = [f"{key}={json.dumps(value)}" for key, value in node.items() if "." in key]
    if forbidden := [change for change in own if not change.startswith(SITE_OPTIONS)]:
        raise FlowerError(
            f"the node config sets {forbidden[0]}, but a site can only change {' and '.join(SITE_OPTIONS)} keys"
        )
    simulated = "partition-id" in node and "folder" not in node
    place = (
        _required(context.run_config, "sites", "run config") if simulated else _required(node, "folder", "node config")
    )
    key = Path(str(node["key"])) if "key" in node else None
    return open_site(name, Path(str(place)), *site_settings(config, name, changes, own), key)[0]


def site_settings(config: Path, name: str, changes: Iterable[str], own: Iterable[str]) -> tuple[Config, Config]:
    """Load the experiment as all parties share it, and as it is at one site.

    Args:
        config: The experiment's config file.
        name: The client's name.
        changes: Overrides that all parties share.
        own: Overrides of this site.
    """
    shared = _load(config, changes)
    where = [f"split.client={json.dumps(name)}"] if shared.split["name"] == "site" else []
    return shared, _load(config, [*changes, *own, *where])


def open_site(name: str, place: Path, shared: Config, own: Config, key: Path | None = None) -> tuple[Site, Experiment]:
    """Build a site, and the experiment that it is part of.

    Args:
        name: The client's name.
        place: Folder of the site's state, with one folder per experiment.
        shared: The experiment as all parties share it.
        own: The experiment at this site.
        key: The site's SSH key, which signs its keys of secure aggregation.

    Raises:
        FlowerError: If the experiment has no such client.
    """
    for code, digest in own.code.items():
        print(f"{printable(name)}: running own code {printable(code)}, version {digest}", flush=True)
    folder = place / _identity(shared) / path_component(name)
    new = new_secret(own)
    secret = load_or_save(folder, new) if new else None
    experiment = site_experiment(name, own, secret)
    charged = open_ledger(experiment, folder)

    def charge(job: Job) -> None:
        assert charged is not None
        if not charged.ledger.knows(charged.run):
            charged.admit(name)
        charged.asks(job)

    site = Site(
        experiment.run,
        experiment.model,
        name,
        experiment.federation[name],
        folder,
        experiment.availability,
        experiment.device,
        experiment.evaluator,
        shared_digest(shared),
        lambda: experiment.base_digest,
        cache(lambda: examples_digest(experiment.federation[name].train)),
        _answered(place, experiment.run.secret, name),
        None if charged is None else charge,
        peers=experiment.federation.clients,
        key=key,
        make_engine=experiment.site_engine,
    )
    return site, experiment


def site_experiment(name: str, own: Config, secret: Key | None = None) -> Experiment:
    """Build the experiment of a site. Nothing is written.

    Args:
        name: The client's name.
        own: The experiment at this site.
        secret: Key for the private random draws. Default: a new random key.

    Raises:
        FlowerError: If the experiment has no such client.
    """
    experiment = build(as_one_site(own), secret)
    if name not in experiment.federation.clients:
        raise FlowerError(f"this site is the client '{name}', but the experiment has no such client")
    return experiment


def as_one_site(config: Config) -> Config:
    """Return the experiment as one site runs it: one client, and no tracker, since the server alone records rows."""
    return replace(config, engine=replace(config.engine, clients_per_block=1), track=TrackConfig())


def _settings(config: Path, settings: Mapping[str, Any]) -> Config:
    return _load(config, shlex.split(_set(settings)))


def _set(settings: Mapping[str, Any]) -> str:
    """Return the changes to the experiment in Flower's run config."""
    return str(settings.get("set", ""))


def _load(config: Path, changes: Iterable[str]) -> Config:
    with importing():
        found = load(config, changes)
    if found.split.get("unseen") is not None:
        raise FlowerError("split.unseen is for simulations: a client that takes no part has no node; leave it out")
    if found.split.get("reorder") is not None:
        raise FlowerError("split.reorder is for simulations: a site's data is as it is; leave it out")
    return found


def _identity(config: Config) -> str:
    """Return a folder name per experiment, so that two runs at one site stay separate."""
    return f"{label_folder(config.label)}-{hashlib.blake2b(config.to_toml().encode(), digest_size=6).hexdigest()}"


def _answered(place: Path, secret: Key | None, client: str) -> Path | None:
    """Return the file that records the rounds for which noise was drawn.

    Noise depends only on secret, round and client, so runs with the same secret share this file, outside their folders.
    """
    if secret is None:
        return None
    return place / "answered" / f"{path_component(client)}-{(secret / 'answered').digest(8).hex()}.json"


def _required(settings: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in settings:
        raise FlowerError(f"the {where} lacks '{key}'; it has: {', '.join(sorted(settings)) or 'nothing'}")
    return settings[key]


def _check_same(config: Config, folder: Path, remedy: str) -> None:
    """Raise an error with this remedy if the run in the folder has another config. The engine may differ."""
    if differing := differences(load_recorded(folder, own_code=config.code), config):
        raise run_folder.RunFolderError(f"{folder} holds a run of another config: {differing[0]}; {remedy}")


def _free_folder(folder: Path) -> Path:
    """Return a sibling of the folder that does not exist yet."""
    return next(free for number in count(2) if not (free := folder.with_name(f"{folder.name}-{number}")).exists())


def _line(row: Row) -> str:
    lost = "".join(f"; lost {printable(client)}: {printable(reason)}" for client, reason in row["lost"].items())
    scores = "".join(f", {metric} {value:.4f}" for metric, value in (row["test"] or {}).items())
    answered = len(row["cohort"]) - len(row["lost"])
    return f"round {row['round']}: {answered} of {len(row['cohort'])} answered in {row['seconds']:.1f} s{scores}{lost}"
