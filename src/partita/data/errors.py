"""Data that cannot be had as it was asked for."""

from __future__ import annotations

import importlib
from typing import Any


class DataError(ValueError):
    """A task, a split or a client that cannot be what was asked for."""


def need(module: str, extra: str) -> Any:
    """A module of an optional package, imported when it is used."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise DataError(f"this needs the package '{package}': pip install 'partita[{extra}]'") from error
