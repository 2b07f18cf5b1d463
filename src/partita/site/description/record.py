"""A site's description as a file. Another party wrote it, so it is checked before anything is believed or shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypedDict, cast

from partita.record.check import ShapeError, check_of, only
from partita.storage import atomic_files
from partita.storage.atomic_files import DamageError, LinkError
from partita.storage.safe_text import printable

FORMAT = 2
MAX_BYTES = 2**20  # of a file
MAX_NAME = 100  # characters of a name
MAX_CLASSES = 1000
MAX_COUNT = 10**12
CLASSES_FILE = "classes.json"  # in a site's folder: the classes that the group agreed on, in order

Name = Annotated[
    str, only(lambda text: 0 < len(text) <= MAX_NAME and printable(text) == text, f"1 to {MAX_NAME} visible characters")
]
Count = Annotated[int, only(lambda count: 0 <= count <= MAX_COUNT, f"a number from 0 to {MAX_COUNT:,}")]
Classes = Annotated[
    list[Name],
    only(lambda names: len(names) == len(set(names)) <= MAX_CLASSES, f"at most {MAX_CLASSES} different names"),
]


class DescriptionError(ValueError):
    """A description cannot be read, or cannot be made."""


class Protection(TypedDict):
    """How the counts of a description are protected. Names of classes and facts are not."""

    least: Count  # counts of fewer units are hidden; 0 if noise is added instead
    unit: Name  # what is protected: "row", or the column whose values are units
    epsilon: Annotated[float, only(lambda value: 0 <= value <= MAX_COUNT, "a number from 0 up")]  # 0: no noise is added


class Description(TypedDict):
    """What a site tells about its data."""

    format: Annotated[int, only(lambda number: number == FORMAT, f"{FORMAT}, which this version of partita reads")]
    site: Name
    data: Name  # name of the data in the experiment, such as "text"
    kind: Name  # kind of the task
    facts: Mapping[Name, Count]  # what must be the same at all sites, such as the size of images
    classes: Classes  # in order; empty if the task has none
    protection: Protection
    counts: Mapping[Name, Mapping[Name, Count | None]]  # rows in each cell of each table; None if hidden
    typical: Mapping[Name, Name]  # quantiles of the lengths of texts, each as the cell that holds it


def to_json(description: Description) -> str:
    """Return the content of the file."""
    return json.dumps(description, indent=1, ensure_ascii=False) + "\n"


def read_description(path: Path) -> Description:
    """Read a description that another party wrote.

    Raises:
        DescriptionError: If the file cannot be read, is too large, or is not a description.
    """
    return cast(Description, _read(path, Description, "ask the site to write it again with: partita site describe"))


def read_classes(path: Path) -> tuple[str, ...]:
    """Read the classes that the group agreed on, in order.

    Raises:
        DescriptionError: If the file is not a list of names.
    """
    return tuple(_read(path, Classes, "ask the server's operator for it"))


def check_classes(classes: tuple[str, ...]) -> list[str]:
    """Return the names of classes, which leave the site.

    Raises:
        DescriptionError: If they are too many for classes, or no names.
    """
    try:
        return cast(list[str], check_of(Classes)(list(classes), "the list of classes"))
    except ShapeError as error:
        raise DescriptionError(
            f"{error}; name the right column in data.label: names of classes leave the site"
        ) from error


def _read(path: Path, form: Any, remedy: str) -> Any:
    where = printable(path)
    try:
        return check_of(form)(atomic_files.parse_json(atomic_files.read(path, MAX_BYTES), where), where)
    except (OSError, DamageError, LinkError, ShapeError) as error:
        raise DescriptionError(f"cannot read {where}: {printable(error).partition(';')[0][:300]}; {remedy}") from error
