"""The user's own functions in a config: where they are named, and how a recorded config names them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from partita.core.own_code import FOLDER, CodeError, Reference, digests, read_source
from partita.core.registry import find_reference

# Tables whose key `name` names a function of this kind. A method may be several names, joined by "+".
NAMED_TABLES = ("method", "data", "split", "model", "sampling")
# Keys that list names of functions: (table, key) -> what a name stands for.
NAMED_LISTS = {("evaluate", "metrics"): "metric", ("track", "to"): "tracker"}

Raw = Mapping[str, Any]


def references_in(raw: Raw) -> list[Reference]:
    """Return the user's own functions that a raw config names, and those of installed packages, each once."""
    return list(_named_in(raw))


def custom_code_in(raw: Raw) -> list[Reference]:
    """Return the functions of files and modules that a raw config names, without the names that packages register."""
    return [reference for reference, name in _named_in(raw).items() if ":" in name]


def _named_in(raw: Raw) -> dict[Reference, str]:
    found: dict[Reference, str] = {}

    def note(name: str, reference: Reference) -> str:
        found[reference] = name
        return name

    _map_references(raw, note)
    return found


def anchored(raw: Raw, folder: Path) -> dict[str, Any]:
    """Return a raw config in which the paths of own files are absolute. They are relative to `folder`."""
    return _map_references(raw, lambda name, reference: _keep_plugin(name, reference.relative_to(folder)))


def portable(raw: Raw) -> dict[str, Any]:
    """Return a raw config in which own files are named by their copies in the folder `code` next to the config."""
    return _map_references(raw, lambda name, reference: _keep_plugin(name, reference.portable()))


def named_from(raw: Raw, folder: Path) -> dict[str, Any]:
    """Return a raw config in which own files in a folder are named from there. The paths of others are absolute."""
    return _map_references(raw, lambda name, reference: _keep_plugin(name, reference.named_from(folder)))


def _keep_plugin(name: str, reference: Reference) -> str:
    """Return the reference as a name. The name that a package registers stays as it is."""
    return str(reference) if ":" in name else name


def check_recorded(recorded: object, found: Mapping[str, str]) -> None:
    """Check that the own code is that of a recorded config.

    Args:
        recorded: The table `code` of the recorded config.
        found: The digests of the code that is there now.

    Raises:
        CodeError: If a file or module has changed.
    """
    if not isinstance(recorded, Mapping) or not all(isinstance(each, str) for each in recorded.values()):
        raise CodeError("[code] is not as partita writes it; it must be a table of digests, or left out")
    for key, now in found.items():
        if key not in recorded:
            raise CodeError(f"[code] does not list '{key}', which the config names; restore the recorded config")
        if recorded[key] != now:
            raise CodeError(f"{changed(key)}; restore it, or start a new run")


def changed(key: str) -> str:
    """Say that a file or module is not the one that a run has recorded."""
    return f"{FOLDER}/{key} has changed" if key.endswith(".py") else f"the module '{key}' has changed"


def code_copies(references: Iterable[Reference]) -> dict[str, bytes]:
    """Return the texts of own files by the path of their copy next to a recorded config. Modules are not copied."""
    return {f"{FOLDER}/{each.key}": read_source(each) for each in references if each.path}


def code_digests(raw: Raw) -> dict[str, str]:
    """Return the digests of all own code that a raw config names."""
    return digests(references_in(raw))


def _map_references(raw: Raw, change: Callable[[str, Reference], str]) -> dict[str, Any]:
    """Return a raw config in which the names of functions that are not built in are changed."""
    result = dict(raw)

    def mapped(what: str, name: object) -> object:
        reference = find_reference(what, name) if isinstance(name, str) else None
        return name if reference is None else change(str(name), reference)

    for table in NAMED_TABLES:
        options = raw.get(table)
        if isinstance(options, Mapping) and isinstance(options.get("name"), str):
            parts = options["name"].split("+") if table == "method" else [options["name"]]
            result[table] = {**options, "name": "+".join(str(mapped(table, part)) for part in parts)}
    for (table, key), what in NAMED_LISTS.items():
        options = raw.get(table)
        if isinstance(options, Mapping) and isinstance(options.get(key), list | tuple):
            result[table] = {**options, key: [mapped(what, name) for name in options[key]]}
    return result
