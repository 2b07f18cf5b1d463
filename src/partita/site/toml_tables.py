"""Strict TOML files of a site: each table is a dataclass, and an unknown key is refused with the closest match."""

from __future__ import annotations

import dataclasses
import keyword
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from partita.core.options import MISSING, closest_match, describe, format_name, format_value, matches_type, options_of
from partita.experiment.config import read_toml


class SiteError(ValueError):
    """A file of the site is invalid, or something that it names is missing."""


T = TypeVar("T")


def load_table(path: Path, kind: type[T], **given: Any) -> T:
    """Read a TOML file into a dataclass.

    A field whose type is another dataclass is a table, and a tuple of dataclasses is an array of tables. The key of a
    field `from_` is `from`, because that is a word of Python's.

    Args:
        path: The file.
        kind: The dataclass. All its types are annotated as in `partita.core.options`.
        given: Fields that do not come from the file.

    Raises:
        ConfigError: If the file cannot be read, or is not TOML.
        SiteError: If a key is unknown or missing, or a value is invalid. The message names file, key and remedy.
    """
    try:
        return _table(kind, read_toml(path), "", given)
    except SiteError as error:
        raise SiteError(f"{path}: {error}") from error


def _table(kind: type[T], raw: Mapping[str, Any], where: str, given: Mapping[str, Any]) -> T:
    options = {_key(name): option for name, option in options_of(kind, given).items()}
    values = dict(given)
    for key, value in raw.items():
        full = f"{where}.{key}" if where else key
        if key not in options:
            raise SiteError(f"unknown key {format_value(full)}; {closest_match(key, options)}")
        table, hint = _dataclass_in(options[key].hint), options[key].hint
        parts = value if table is not None and _is_array(hint) and isinstance(value, list) else [value]
        if table is not None and not all(isinstance(part, Mapping) for part in parts):
            wanted = f"tables, [[{full}]]" if _is_array(hint) else f"a table, [{full}]"
            raise SiteError(f"{format_name(full)} is {format_value(value)}; it must be {wanted}")
        if table is None and not matches_type(value, hint):
            raise SiteError(f"{format_name(full)} is {format_value(value)}; it must be {describe(hint)}")
        found: Any = value
        if table is not None and _is_array(hint):
            found = [_table(table, part, f"{full}[{number}]", {}) for number, part in enumerate(parts, 1)]
        elif table is not None:
            found = _table(table, value, full, {})
        values[options[key].name] = tuple(found) if isinstance(found, list) else found
    for key, option in options.items():
        if key not in raw and option.default is MISSING:
            full = f"{where}.{key}" if where else key
            table = _dataclass_in(option.hint)
            kind_of_key = describe(option.hint) if table is None else f"a table, [{full}]"
            kind_of_key = f"tables, [[{full}]]" if table is not None and _is_array(option.hint) else kind_of_key
            raise SiteError(f"'{full}' is missing; it must be {kind_of_key}")
    try:
        return kind(**values)
    except SiteError as error:
        raise SiteError(f"{where}.{error}" if where else str(error)) from error


def _key(name: str) -> str:
    return name[:-1] if keyword.iskeyword(name[:-1]) else name


def _is_array(hint: Any) -> bool:
    return tuple in (get_origin(hint), *map(get_origin, get_args(hint)))


def _dataclass_in(hint: Any) -> Any:
    """Return the dataclass of a table, also of one that may be left out; None for any other type."""
    candidates = [hint, *get_args(hint), *(inner for each in get_args(hint) for inner in get_args(each))]
    return next((each for each in candidates if dataclasses.is_dataclass(each) and isinstance(each, type)), None)
