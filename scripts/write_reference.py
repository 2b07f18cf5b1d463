"""Write docs/reference/config.md: every table and key of a config, from the annotations that the code checks."""

from __future__ import annotations

import inspect
import re
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from partita import data, methods, models
from partita.core.options import MISSING, Option, describe, import_from_registry
from partita.experiment.config import schema
from partita.methods.cards import card

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "config.md"
INTRODUCTION = """# Reference: configs

Written by `python scripts/write_reference.py` from the annotations that the code checks; do not edit it by hand.

A config is a TOML file. Every key is checked when it is read: an unknown key, a wrong type or a value out of its range
is an error that names the key and what it must be. Whole numbers fit 64 bits, numbers are finite, and texts are one
line. A key without a default must be given; a key whose default is "–" may be left out.
"""
HEADINGS = {
    "": "Top level",
    "method": "`[method]`: `name` says which, `a+b` composes two",
    "data": "`[data]`: `name` says which",
    "split": "`[split]`: `name` says which",
    "model": "`[model]`: `name` says which",
}
INDEXES = {"method": methods.INDEX, "data": data.INDEX, "split": data.SPLITS, "model": models.INDEX}


def reference() -> str:
    """The whole page."""
    parts, last = [INTRODUCTION], None
    for heading, options in schema().items():
        table, _, name = heading.partition(" ")
        if table != last:
            parts.append(f"## {HEADINGS.get(table, f'`[{table}]`')}\n")
            last = table
        if name:
            parts.append(f"### `{name}`\n")
            parts.append(_about(table, name) + "\n")
        meanings = _of_card(name) if table == "method" else {}
        parts.append(_rows(options, meanings) if options else "No options.\n")
    return "\n".join(parts)


def _about(table: str, name: str) -> str:
    """A method is described by the first line of its file, others by that of their function."""
    function = import_from_registry(INDEXES[table], name, table)
    owner = inspect.getmodule(function) if table == "method" else function
    return (inspect.getdoc(owner) or "").partition("\n\n")[0].replace("\n", " ")


def _of_card(name: str) -> dict[str, str]:
    section = card(name).partition("## Parameters\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| `.+?` \| (.+) \|$", section, re.MULTILINE))


def _rows(options: dict[str, Option], meanings: dict[str, str]) -> str:
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for option in options.values():
        meaning = option.meaning or meanings.get(option.name, "")
        if not meaning:
            raise SystemExit(
                f"'{option.name}' has no meaning; write one into its annotation, or into the method's card"
            )
        lines.append(f"| `{option.name}` | {_value(option.hint)} | {_default(option.default)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _value(hint: Any) -> str:
    """As an error would describe it, without what TOML cannot say."""
    parts = get_args(hint)
    kind = parts[0] if hasattr(hint, "__metadata__") else hint
    if get_origin(kind) in (Union, types.UnionType):
        kinds = [each for each in get_args(kind) if each not in (types.NoneType, Path)]
        return " or ".join(_value(each) for each in kinds)
    if get_origin(kind) is Literal:
        return " or ".join(f"`{_toml(each)}`" for each in get_args(kind))
    said = describe(hint)
    return said.replace("a text of one line that is not empty", "a text").replace(
        "a text of one line", "a text or `''`"
    )


def _default(value: Any) -> str:
    return "must be given" if value is MISSING else "–" if value is None else f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else repr(value)


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(reference(), encoding="utf-8")
