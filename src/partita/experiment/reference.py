"""What each config key takes, its default and its meaning, in words."""

from __future__ import annotations

import inspect
import re
import types
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from partita import methods
from partita.core.options import (
    MISSING,
    Option,
    OptionError,
    closest_match,
    describe,
    format_value,
)
from partita.core.registry import find_function, find_reference
from partita.experiment.config import headings, options_under
from partita.experiment.config_code import NAMED_TABLES
from partita.methods.cards import meanings


@dataclass(frozen=True)
class Key:
    """One key of a config table, in words."""

    name: str
    value: str  # what it takes
    default: str  # in TOML; "must be given", or "–" for a key that may be left out
    meaning: str

    def to_json(self) -> dict[str, str]:
        """Return the fields as a dict for JSON."""
        return asdict(self)


def keys_under(heading: str) -> list[Key]:
    """Return the keys of a table.

    Args:
        heading: A heading of `experiment.config.headings`, such as "training" or "method fedprox".
    """
    table, _, name = heading.partition(" ")
    explained = meanings(name) if table == "method" and name in methods.INDEX else _documented(heading)
    return [
        Key(option.name, value_of(option.hint), default_of(option), option.meaning or explained.get(option.name, ""))
        for option in options_under(heading).values()
    ]


def about(heading: str) -> str:
    """Return one sentence on what a heading names, such as a method or a split. Empty for tables without names."""
    table, _, name = heading.partition(" ")
    if table not in NAMED_TABLES:
        return ""
    # A method is described by the first line of its file, the others by that of their function.
    function = find_function(table, name)
    owner = inspect.getmodule(function) if table == "method" and name in methods.INDEX else function
    return (inspect.getdoc(owner) or "").partition("\n\n")[0].replace("\n", " ")


def _documented(heading: str) -> dict[str, str]:
    """Return the meaning of each option of a named function, from the section `Args:` of its docstring."""
    table, _, name = heading.partition(" ")
    if table not in NAMED_TABLES:
        return {}
    text = inspect.getdoc(find_function(table, name)) or ""
    section = text.partition("Args:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", section, re.MULTILINE)
    return {option: " ".join(meaning.split()) for option, meaning in found}


def find_headings(wanted: str) -> list[str]:
    """Return the headings that a table's name stands for.

    Args:
        wanted: A table ("training"), a table and a name ("method fedprox" or "method.fedprox"; "method.a+b" for a
            composition), or a table that holds several names ("split").

    Raises:
        OptionError: If there is no such table or name.
    """
    known = headings()
    if (plain := wanted.strip().strip("[]")) in known and "." in plain:
        return [plain]
    table, _, name = _split_heading(wanted)
    if not name and table in known:
        return [table]
    tables = sorted({heading.partition(" ")[0] for heading in known} - {""})
    if table not in tables:
        raise OptionError(f"there is no table {format_value(table)}; {closest_match(table, tables)}")
    names = [heading.partition(" ")[2] for heading in known if heading.startswith(f"{table} ")]
    if not names and name:
        raise OptionError(f"the table '{table}' has no tables in it; use: partita options {table}")
    wanted_names = (name.split("+") if table == "method" else [name]) if name else names
    for each in wanted_names:
        if each not in names and find_reference(table, each) is None:
            raise OptionError(f"unknown {table} {format_value(each)}; {closest_match(each, names)}")
    return [f"{table} {each}" for each in wanted_names]


def _split_heading(wanted: str) -> tuple[str, str, str]:
    """Split "[method.fedprox]" or "method fedprox" into table and name. The name of own code has dots itself."""
    if ":" in wanted:
        table, dot, name = wanted.strip().strip("[]").strip().replace(" ", ".", 1).partition(".")
        return table, dot, name
    return re.sub(r"[\[\]\s.]+", " ", wanted).strip().partition(" ")


def value_of(hint: Any) -> str:
    """Describe the values of a type as an error would, without what TOML cannot hold."""
    parts = get_args(hint)
    kind = parts[0] if hasattr(hint, "__metadata__") else hint
    if get_origin(kind) in (Union, types.UnionType):
        kinds = [each for each in get_args(kind) if each not in (types.NoneType, Path)]
        return " or ".join(value_of(each) for each in kinds)
    if get_origin(kind) is Literal:
        return " or ".join(f"`{_toml(each)}`" for each in get_args(kind))
    said = describe(hint)
    return said.replace("a text of one line that is not empty", "a text").replace(
        "a text of one line", "a text or `''`"
    )


def default_of(option: Option) -> str:
    """Return the default of an option as TOML, "must be given", or "–" for an option that may be left out."""
    value = option.default
    return "must be given" if value is MISSING else "–" if value is None else f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else repr(value)
