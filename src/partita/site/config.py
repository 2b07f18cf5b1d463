"""The settings of a site (`site.toml`): who it is, which experiment it takes part in, and where its files are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from partita.core.options import format_value
from partita.experiment.config import SITES_OWN
from partita.site.toml_tables import SiteError, load_table

SITE = "site.toml"
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):(\d{1,5})")


@dataclass(frozen=True)
class ServerTable:
    """The `[server]` table: where the group's SuperLink is, and the certificate authority that it must prove."""

    address: Annotated[str, "host and port of the group's SuperLink, as `fl.example.org:8765`"]
    root_certificates: Annotated[str, "file with the certificate of the group's certificate authority"] = "ca.crt"

    def __post_init__(self) -> None:
        found = _ADDRESS.fullmatch(self.address)
        if found is None or not 0 < int(found[2]) < 2**16:
            raise SiteError(f"address is {format_value(self.address)}; write host and port, as 'fl.example.org:8765'")


@dataclass(frozen=True)
class KeysTable:
    """The `[keys]` table: keys that never leave the site."""

    node: Annotated[str, "private key of the SuperNode; left out: `keys/` and the site's name"] = ""


@dataclass(frozen=True)
class SiteConfig:
    """A site's settings. Paths in the file are relative to its folder; `load_site` resolves them."""

    folder: Path  # of the file
    name: Annotated[str, "the client's name in the experiment"]
    server: Annotated[ServerTable, "the group's server"]
    experiment: Annotated[str, "the experiment that all parties agreed on"] = "experiment.toml"
    policy: Annotated[str, "what may leave the site"] = "policy.toml"
    state: Annotated[str, "folder of partita's state: personal parameters, answered rounds, secret, log"] = "state"
    keys: Annotated[KeysTable, "the site's keys"] = field(default_factory=KeysTable)
    set: Annotated[
        Mapping[str, Any], 'config keys that differ here, such as `"data.path" = "/srv/data"`; `data.` and `engine.`'
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_set(self.set)

    @property
    def experiment_file(self) -> Path:
        return self.folder / self.experiment

    @property
    def policy_file(self) -> Path:
        return self.folder / self.policy

    @property
    def state_folder(self) -> Path:
        return self.folder / self.state

    @property
    def root_certificates(self) -> Path:
        return self.folder / self.server.root_certificates

    @property
    def node_key(self) -> Path:
        return self.folder / (self.keys.node or f"keys/{self.name}")

    @property
    def changes(self) -> list[str]:
        """Overrides of the experiment's config, as `partita.experiment.config.load` takes them."""
        return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in self.set.items()]


def check_set(settings: Mapping[str, Any]) -> None:
    """Check the config keys that differ at a site.

    Raises:
        SiteError: If one is not a key of a table that a site may change.
    """
    for key, value in settings.items():
        table, dot, name = key.partition(".")
        if isinstance(value, Mapping) or not dot or not name:
            raise SiteError(f'set.{key} is no key of a table; write it in quotes: "data.path" = "/srv/data"')
        if table not in SITES_OWN:
            tables = " and ".join(f"{each}." for each in SITES_OWN)
            raise SiteError(f"set.{key} cannot differ from the experiment; a site can only set {tables} keys")


def load_site(path: Path) -> SiteConfig:
    """Read the settings of a site.

    Args:
        path: The file `site.toml`, or the folder that holds it.

    Raises:
        ConfigError: If the file cannot be read, or is not TOML.
        SiteError: If a key is unknown or missing, or a value is invalid. The message names file, key and remedy.
    """
    path = path / SITE if path.is_dir() else path
    # Absolute, so that a later change of the working folder does not move the site's files.
    return load_table(path, SiteConfig, folder=path.resolve().parent)


def check_files(site: SiteConfig) -> None:
    """Check that the files which a site names exist.

    Raises:
        SiteError: If one is missing. The message says which key names it, and where it comes from.
    """
    wanted = {
        "experiment": (site.experiment_file, "copy the experiment that the group agreed on"),
        "policy": (site.policy_file, "write down what may leave this site"),
        "server.root_certificates": (site.root_certificates, "ask the server's operator for the group's certificate"),
        "keys.node": (site.node_key, "make the key here with: sh make-keys.sh"),
    }
    for key, (file, remedy) in wanted.items():
        if not file.is_file():
            raise SiteError(f"{key} names {file}, which does not exist; {remedy}")
