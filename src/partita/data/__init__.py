"""Load tasks by name and split them into federations."""

from __future__ import annotations

import inspect
from typing import Any

from partita.core.options import validate_options
from partita.core.registry import call, find_function
from partita.core.rng import Key
from partita.data.errors import DataError
from partita.data.split import SPLITS, split
from partita.data.task import Federation, Subset, Table, Task

INDEX = {
    "brat": "partita.data.standoff:brat",
    "digits": "partita.data.digits:digits",
    "i2b2": "partita.data.i2b2:i2b2",
    "image_regression": "partita.data.regression:image_regression",
    "images": "partita.data.images:images",
    "lm": "partita.data.language_modeling:lm",
    "synthetic": "partita.data.synthetic:synthetic",
    "text": "partita.data.text:text",
    "text_regression": "partita.data.regression:text_regression",
    "tokens": "partita.data.tokens:tokens",
}

__all__ = ["INDEX", "SPLITS", "DataError", "Federation", "Subset", "Table", "Task", "load", "split", "takes"]


def load(name: str, key: Key, **options: Any) -> Task:
    """Load a task.

    Args:
        name: Name of the task: a key of `INDEX`, or the user's own function.
        key: Key for random draws. Passed to tasks that take one.
        **options: Options of the task.
    """
    make = find_function(INDEX, name, "data")
    options = validate_options(make, options, "data", given=["key"], name=name)
    if "key" in inspect.signature(make).parameters:
        options["key"] = key
    task: Task = call(make, (Task,), name, "data", **options)
    return task


def takes(name: str, option: str) -> bool:
    """Return whether the task `name` has the option `option`."""
    return option in inspect.signature(find_function(INDEX, name, "data")).parameters
