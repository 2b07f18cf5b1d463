"""The group of a federation (`group.toml`): its server, its sites, and the image that they run.

Values of this file end up in shell scripts, unit files, YAML and firewall rules. So each is limited to characters that
mean nothing there, and the templates need no rules for quoting.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from partita.core.options import Count, Range, closest_match, format_value
from partita.experiment.config import Config
from partita.site.config import ServerTable, check_set
from partita.site.toml_tables import SiteError, load_table

GROUP = "group.toml"
SERVER = "server"  # the server's folder, so no site can have this name
LOCAL = ("localhost", "127.0.0.1")  # the server's certificate always has these: its own processes connect by them
Bytes = Annotated[int, Range(low=1, high=2**60)]

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_TITLE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9 ._-]{0,58}[A-Za-z0-9])?")
_HOST = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*", re.IGNORECASE)
_FOLDER = re.compile(r"(/[A-Za-z0-9_@+][A-Za-z0-9._@+-]*)+")
_IMAGE = re.compile(r"[a-z0-9][a-z0-9._:/-]*@sha256:[0-9a-f]{64}")


def _check(key: str, value: str, valid: Callable[[str], object], form: str) -> None:
    if not valid(value):
        raise SiteError(f"{key} is {format_value(value)}; {form}")


def _network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_absolute(path: str) -> bool:
    """Whether a path is absolute and has no character that means something in a script, a unit file or YAML."""
    return _FOLDER.fullmatch(path) is not None


NETWORK = "write an IP address or a network, as '203.0.113.5' or '198.51.100.0/24'"
ABSOLUTE = "write an absolute path of letters, digits and ._@+-, as '/srv/partita/data'"
PINNED = "pin it by its digest, as 'registry.example.org/partita@sha256:' and 64 hexadecimal digits"


@dataclass(frozen=True)
class GroupServer:
    """The `[server]` table."""

    address: Annotated[str, "host and port that the sites connect to, as `fl.example.org:8765`"]
    names: Annotated[tuple[str, ...], "further names and IP addresses in its certificate"] = ()
    ips: Annotated[
        tuple[str, ...], "its IP addresses, the only ones a site may connect to; left out: the host, if it is one"
    ] = ()
    data: Annotated[str, "the server's `data.path`; left out: that of the experiment"] = ""
    folder: Annotated[str, "where the server's folder will be on its machine"] = "/opt/partita/server"

    def __post_init__(self) -> None:
        ServerTable(self.address)
        for name in (self.host, *self.names):
            _check("names", name, lambda name: _is_ip(name) or _HOST.fullmatch(name), "write a host name or IP address")
        for ip in self.ips:
            _check("ips", ip, _is_ip, "write an IP address, as '203.0.113.5'")
        if not self.ips and not _is_ip(self.host):
            raise SiteError(
                f"ips is missing; list the IP addresses of {self.host}, because the firewall rules of the sites admit "
                "no others, and a site needs no name server then"
            )
        for key, folder in {"folder": self.folder, **({"data": self.data} if self.data else {})}.items():
            _check(key, folder, is_absolute, ABSOLUTE)

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def inner_port(self) -> int:
        """The port of the SuperLink itself, on 127.0.0.1, behind the proxy."""
        return self.port + 1 if self.port < 2**16 - 1 else self.port - 1

    @property
    def host_is_name(self) -> bool:
        return not _is_ip(self.host)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Its IP addresses."""
        return self.ips or (self.host,)

    @property
    def certificate_names(self) -> str:
        """The names of its certificate, as OpenSSL's `subjectAltName`."""
        names = dict.fromkeys((self.host, *self.names, *self.ips, *LOCAL))
        return ",".join(f"{'IP' if _is_ip(name) else 'DNS'}:{name}" for name in names)


@dataclass(frozen=True)
class SiteLimits:
    """The `[site.limits]` table: limits of the site's policy. Those left out are what the plan needs."""

    bytes_per_round: Annotated[Bytes | None, "most bytes that may leave in a round"] = None
    bytes_total: Annotated[Bytes | None, "most bytes that may leave in all"] = None
    rounds: Annotated[Count | None, "most rounds"] = None


@dataclass(frozen=True)
class GroupSite:
    """A `[[site]]` table."""

    name: Annotated[str, "the client's name in the experiment, and of its folder"]
    data: Annotated[str, "`data.path` at the site; for data of your own file, what that file reads there"] = ""
    ips: Annotated[tuple[str, ...], "addresses or networks that it connects from; the server admits no others"] = ()
    folder: Annotated[str, "where its folder will be on its machine; left out: `/opt/partita/NAME`"] = ""
    set: Annotated[Mapping[str, Any], 'config keys that differ there, such as `"engine.device" = "cuda"`'] = field(
        default_factory=dict
    )
    limits: Annotated[SiteLimits, "limits of its policy"] = field(default_factory=SiteLimits)

    def __post_init__(self) -> None:
        form = "write lower-case letters, digits and hyphens, at most 40, as 'ward-3'"
        _check("name", self.name, _NAME.fullmatch, form)
        if self.name == SERVER:
            raise SiteError(f"name is '{SERVER}', which is the server's folder; choose another name")
        for ip in self.ips:
            _check("ips", ip, _network, NETWORK)
        for key, folder in {"data": self.data, "folder": self.folder}.items():
            _check(key, folder, lambda folder: not folder or is_absolute(folder), ABSOLUTE)
        check_set(self.set)
        if "data.path" in self.set:
            raise SiteError("set.\"data.path\" is written as data = '/srv/data', because containers must see it too")

    @property
    def home(self) -> str:
        """Where its folder will be on its machine."""
        return self.folder or f"/opt/partita/{self.name}"


@dataclass(frozen=True)
class Images:
    """The `[images]` table: container images, each pinned by its digest."""

    partita: Annotated[str, "image of partita, built from `image/`"] = ""
    base: Annotated[str, "image of Python 3.11 or later that it is built on"] = ""
    nginx: Annotated[str, "image of nginx, for the server's proxy"] = ""

    def __post_init__(self) -> None:
        for key in ("partita", "base", "nginx"):
            _check(key, getattr(self, key), lambda image: not image or _IMAGE.fullmatch(image), PINNED)

    def pinned(self, key: str) -> str:
        """Return an image. One that is not known yet has a digest that no registry has, so nothing else is pulled."""
        found: str = getattr(self, key)
        return found or f"unknown.invalid/{key}@sha256:{'0' * 64}"


@dataclass(frozen=True)
class Group:
    """A group of sites and their server. `load_group` reads it."""

    folder: Path  # of the file
    name: Annotated[str, "the group's name, for its certificates"]
    server: Annotated[GroupServer, "the server"]
    site: Annotated[tuple[GroupSite, ...], "the sites"]
    experiment: Annotated[str, "config of the experiment that all agreed on"] = "experiment.toml"
    images: Annotated[Images, "container images"] = field(default_factory=Images)

    def __post_init__(self) -> None:
        form = "write at most 60 letters, digits, spaces and ._-, because it is the name of a certificate"
        _check("name", self.name, _TITLE.fullmatch, form)
        if not self.site:
            raise SiteError("site is empty; name each site in a table, [[site]]")
        counts = Counter(site.name for site in self.site)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise SiteError(f"two sites have the name '{twice[0]}'; give each a name of its own")

    @property
    def experiment_file(self) -> Path:
        return self.folder / self.experiment

    def check_experiment(self, config: Config) -> None:
        """Check that the experiment is one of exactly these sites, and that each site has data.

        Raises:
            SiteError: If it is not.
        """
        if config.split["name"] != "site":
            raise SiteError(
                f"{self.experiment_file}: split.name is '{config.split['name']}'; a group needs the split 'site', with "
                f"split.sites = {format_value([site.name for site in self.site])}"
            )
        agreed, named = list(config.split["sites"]), [site.name for site in self.site]
        if missing := [name for name in agreed if name not in named]:
            raise SiteError(f"split.sites of the experiment has '{missing[0]}'; add a [[site]] with that name")
        if unknown := [name for name in named if name not in agreed]:
            raise SiteError(
                f"the site '{unknown[0]}' is not in split.sites of the experiment; {closest_match(unknown[0], agreed)}"
            )
        for site in self.site:
            if reads_path(config) and not site.data:
                raise SiteError(f"the site '{site.name}' has no data; say where its rows are, as data = '/srv/data'")
            if "path" not in config.data and "data" not in config.objects and site.data:
                raise SiteError(
                    f"the site '{site.name}' has data = '{site.data}', but data.name = '{config.data['name']}' reads "
                    "no path; leave it out"
                )

    def open_points(self) -> list[str]:
        """Return what is still to be filled in, one sentence each."""
        points = [
            f"images.{key} is not pinned yet: containers cannot start until {GROUP} has its digest"
            for key in ("partita", "base", "nginx")
            if not getattr(self.images, key)
        ]
        closed = [site.name for site in self.site if not site.ips]
        return points + [f"{name} has no ips: the server's firewall rules do not admit it" for name in closed]


def reads_path(config: Config) -> bool:
    """Return whether each site has a `data.path` of its own; data of the user's own file knows where its rows are."""
    return "path" in config.data and "data" not in config.objects


def load_group(path: Path) -> Group:
    """Read a group.

    Raises:
        ConfigError: If the file cannot be read, or is not TOML.
        SiteError: If a key is unknown or missing, or a value is invalid. The message names file, key and remedy.
    """
    return load_table(path, Group, folder=path.resolve().parent)
