"""Tasks by name, and their split into a federation."""

from __future__ import annotations

import inspect
from typing import Any

from partita.core.options import bind, pick
from partita.core.rng import Key
from partita.data.errors import DataError
from partita.data.split import SPLITS, split
from partita.data.task import Federation, Rows, Table, Task

INDEX = {
    "digits": "partita.data.digits:digits",
    "images": "partita.data.images:images",
    "synthetic": "partita.data.synthetic:synthetic",
}

__all__ = ["INDEX", "SPLITS", "DataError", "Federation", "Rows", "Table", "Task", "load", "split"]


def load(name: str, key: Key, **options: Any) -> Task:
    """The named task; the key is for those that draw."""
    make = pick(INDEX, name, "task")
    options = bind(make, options, "data", given=["key"])
    if "key" in inspect.signature(make).parameters:
        options["key"] = key
    task: Task = make(**options)
    return task
