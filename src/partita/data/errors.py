"""Data that cannot be had as it was asked for."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class DataError(ValueError):
    """A task, a split or a client that cannot be what was asked for."""


@contextmanager
def reading(what: str, remedy: str = "mend or replace it") -> Iterator[None]:
    """Turn whatever a library raises over broken data into a DataError that names it.

    Readers of files raise exceptions of a great many kinds, also such as KeyError, OverflowError and MemoryError.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{what} cannot be read: {first_line(error)}; {remedy}") from error


def first_line(error: Exception) -> str:
    """What an error says on its first line, or its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    # A library may print a Python object, whose address helps nobody.
    return re.sub(r" <.* at 0x[0-9a-f]+>", "", lines[0]).rstrip(". ") if lines else type(error).__name__


def need(module: str, extra: str) -> Any:
    """A module of an optional package, imported when it is used."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise DataError(f"this needs the package '{package}': pip install 'partita[{extra}]'") from error
