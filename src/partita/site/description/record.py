"""A site's description as a file. Another party wrote it, so it is checked before anything is believed or shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from partita.storage.atomic_files import DamageError, LinkError, parse_json, read
from partita.storage.safe_text import printable

FORMAT = 1
MAX_BYTES = 2**20  # of a file
MAX_NAME = 100  # characters of a name
MAX_CLASSES = 1000
MAX_TABLES = 20
MAX_CELLS = 1000
MAX_COUNT = 10**12
REMEDY = "ask the site to write it again with: partita site describe"


class DescriptionError(ValueError):
    """A description cannot be read, or cannot be made."""


@dataclass(frozen=True)
class Protection:
    """How the counts of a description are protected. Names of classes and facts are not.

    Attributes:
        least: Counts of fewer units are hidden; 0 if noise is added instead.
        unit: What is protected: "row", or the column whose values are units.
        epsilon: Of all counts together, if noise is added; 0 if not.
        scales: The scale of the discrete Laplace noise in each table, if noise is added.
    """

    least: int = 0
    unit: str = "row"
    epsilon: float = 0.0
    scales: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Description:
    """What a site tells about its data.

    Attributes:
        site: Name of the site.
        data: Name of the data in the experiment, such as "text".
        kind: Kind of the task.
        facts: Properties that must be the same at all sites, such as the size of images.
        classes: Names of the classes, in order; empty if the task has none.
        protection: How the counts are protected.
        counts: Rows in each cell of each table; None if hidden.
        typical: For tables of lengths, sizes and modes, the cells that hold the 10%, 50% and 90% quantile of the rows,
            and the largest cell.
    """

    site: str
    data: str
    kind: str
    facts: Mapping[str, int]
    classes: tuple[str, ...]
    protection: Protection
    counts: Mapping[str, Mapping[str, int | None]]
    typical: Mapping[str, Mapping[str, str]]

    def to_json(self) -> str:
        """Return the content of the file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"


def read_description(path: Path) -> Description:
    """Read a description that another party wrote.

    Raises:
        DescriptionError: If the file cannot be read, is too large, or is not a description.
    """
    try:
        raw = parse_json(read(path, MAX_BYTES), printable(path))
    except (OSError, DamageError, LinkError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).partition(";")[0]
        raise DescriptionError(f"cannot read {printable(path)}: {printable(reason)[:300]}; {REMEDY}") from error
    try:
        return _description(raw)
    except DescriptionError as error:
        raise DescriptionError(f"{printable(path)} is not a description of a site: {error}; {REMEDY}") from error


def check_name(name: object, what: str) -> str:
    """Return a name that is a short, printable text.

    Raises:
        DescriptionError: If it is not.
    """
    if not isinstance(name, str):
        raise DescriptionError(f"{what} is not a text")
    if not 0 < len(name) <= MAX_NAME:
        raise DescriptionError(f"{what} has {len(name):,} characters; it must have 1 to {MAX_NAME}")
    if printable(name) != name:
        raise DescriptionError(f"{what} has invisible characters")
    return name


def _description(raw: object) -> Description:
    fields = _table(raw, "the file", {"format", *Description.__dataclass_fields__})
    if type(fields["format"]) is not int or fields["format"] != FORMAT:
        raise DescriptionError(f"it has another format than {FORMAT}, which this version of partita reads")
    protection = _table(fields["protection"], "'protection'", set(Protection.__dataclass_fields__))
    classes = fields["classes"]
    if not isinstance(classes, list) or len(classes) > MAX_CLASSES:
        raise DescriptionError(f"'classes' is not a list of at most {MAX_CLASSES} names")
    names = tuple(check_name(name, "the name of a class") for name in classes)
    if len(set(names)) < len(names):
        raise DescriptionError("a class is listed twice")
    counts = _mapping(fields["counts"], "'counts'", MAX_TABLES)
    return Description(
        site=check_name(fields["site"], "'site'"),
        data=check_name(fields["data"], "'data'"),
        kind=check_name(fields["kind"], "'kind'"),
        facts={name: _count(value) for name, value in _mapping(fields["facts"], "'facts'", MAX_TABLES).items()},
        classes=names,
        protection=Protection(
            _count(protection["least"]),
            check_name(protection["unit"], "'unit'"),
            _number(protection["epsilon"]),
            None
            if protection["scales"] is None
            else {
                name: _number(value) for name, value in _mapping(protection["scales"], "'scales'", MAX_TABLES).items()
            },
        ),
        counts={
            name: {
                cell: None if value is None else _count(value)
                for cell, value in _mapping(cells, "a table of 'counts'", MAX_CELLS).items()
            }
            for name, cells in counts.items()
        },
        typical={
            name: {
                which: check_name(cell, "a typical cell") for which, cell in _mapping(cells, "'typical'", 10).items()
            }
            for name, cells in _mapping(fields["typical"], "'typical'", MAX_TABLES).items()
        },
    )


def _table(raw: object, where: str, keys: set[str]) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise DescriptionError(f"{where} is not a table")
    if wrong := sorted(raw.keys() ^ keys):
        raise DescriptionError(
            f"{where} {'has the unknown' if wrong[0] in raw else 'lacks the'} key {_shown(wrong[0])}"
        )
    return raw


def _mapping(raw: object, where: str, most: int) -> dict[str, Any]:
    if not isinstance(raw, dict) or len(raw) > most:
        raise DescriptionError(f"{where} is not a table of at most {most} entries")
    return {check_name(name, f"a name in {where}"): value for name, value in raw.items()}


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise DescriptionError(f"a count is not a number from 0 to {MAX_COUNT:,}")
    return value


def _number(value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MAX_COUNT:  # type: ignore[operator]
        raise DescriptionError(f"a number is not from 0 to {MAX_COUNT:,}")
    return float(value)  # type: ignore[arg-type]


def _shown(text: str) -> str:
    return repr(printable(text)[:MAX_NAME])
