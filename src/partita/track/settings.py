"""The settings of a run that trackers get: without secrets, and without paths of the user's machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

# Keys that are never sent: what names sites, digests of own code, and where the run is sent.
WITHHELD = ("code", "data.tokenizer", "split.client", "track")
# A key with one of these as its last word holds a path, such as engine.secret_file, data.path or sampling.trace.
PATH_WORDS = ("dir", "file", "folder", "path", "root", "trace")
LAST_NAME = ("model.path",)  # of this path or Hub id, the last name is sent
NESTED = ("model.adapter",)  # tables in tables that have keys of their own


def sent_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by dotted key as numbers, booleans and texts.

    Args:
        config: The run's config, as nested dicts.
    """
    return {key: value for key, value in _flat(config, "") if not _has_path(value)}


def _flat(table: Mapping[str, Any], place: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in table.items():
        key = f"{place}{name}"
        if key in WITHHELD or (name.rpartition("_")[2] in PATH_WORDS and key not in LAST_NAME):
            continue
        if isinstance(value, Mapping) and (not place or key in NESTED):
            found += _flat(value, f"{key}.")
        elif key in LAST_NAME:
            found.append((key, PureWindowsPath(PurePosixPath(str(value)).name).name))
        elif isinstance(value, bool | int | float | str):
            found.append((key, value))
        elif not _has_path(value):
            found.append((key, json.dumps(value, ensure_ascii=False, default=str)))
    return found


def _has_path(value: Any) -> bool:
    """Whether a value is or holds a path that leaves the current folder. Any option of own code may be one."""
    if isinstance(value, str):
        return value.startswith(("/", "~", "./", "../", ".\\", "..\\", "file:")) or PureWindowsPath(value).is_absolute()
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(_has_path(item) for item in items)
