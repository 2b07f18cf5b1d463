"""Errors for data that cannot be loaded or split."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class DataError(ValueError):
    """A task, split or client is invalid or cannot be loaded."""


@contextmanager
def reading(what: str, remedy: str = "fix or replace it") -> Iterator[None]:
    """Re-raise any exception in the block as a DataError that names `what` and ends with `remedy`.

    File readers raise many exception types on broken data, including KeyError, OverflowError and MemoryError.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{what} cannot be read: {first_line(error)}; {remedy}") from error


def first_line(error: Exception) -> str:
    """Return the first line of an error message, or the type name if the message is empty."""
    lines = str(error).strip().splitlines()
    # Drop the repr of Python objects: a memory address does not help the user.
    return re.sub(r" <.* at 0x[0-9a-f]+>", "", lines[0]).rstrip(". ") if lines else type(error).__name__


def need(module: str, extra: str) -> Any:
    """Import a module of an optional package.

    Raises:
        DataError: If the package is not installed. The message names the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise DataError(f"this needs the package '{package}': pip install 'partita[{extra}]'") from error
