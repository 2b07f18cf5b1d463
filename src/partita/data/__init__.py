"""Load tasks by name and split them into federations."""

from __future__ import annotations

from typing import Annotated, Any

from partita.core.options import Count, Range
from partita.core.registry import make, takes
from partita.core.rng import Key
from partita.data.errors import DataError
from partita.data.few_shot import draw_shots, hold_out_classes
from partita.data.loading import hold_out_groups
from partita.data.split import SPLITS, split
from partita.data.task import Federation, Subset, Table, Task

INDEX = {
    "brat": "partita.data.standoff:brat",
    "chat": "partita.data.chat:chat",
    "digits": "partita.data.digits:digits",
    "i2b2": "partita.data.i2b2:i2b2",
    "image_regression": "partita.data.regression:image_regression",
    "images": "partita.data.images:images",
    "lm": "partita.data.language_modeling:lm",
    "object": "partita.data.objects:given_task",
    "segmentation": "partita.data.segmentation:segmentation",
    "seq2seq": "partita.data.seq2seq:seq2seq",
    "synthetic": "partita.data.synthetic:synthetic",
    "text": "partita.data.text:text",
    "text_regression": "partita.data.regression:text_regression",
    "tokenized": "partita.data.tokenized:tokenized",
    "tokens": "partita.data.tokens:tokens",
    "trainer": "partita.trainers.at_sites:rows",
}

__all__ = ["INDEX", "SPLITS", "DataError", "Federation", "Subset", "Table", "Task", "load", "split"]


def load(
    name: str,
    key: Key,
    *,
    shots: Annotated[
        Count | None, "train rows of each class, all clients together, drawn before the split; left out: all"
    ] = None,
    new_classes: Annotated[
        Count | Annotated[float, Range(above=0, below=1)] | None,
        "last classes that no client trains on: a number, or a fraction with a decimal point; the test is on the "
        "others, and on these",
    ] = None,
    together: str | None = None,
    **options: Any,
) -> Task:
    """Load a task by its name and options, such as `partita.task("digits", key)`.

    Args:
        name: Name of the task: a key of `INDEX`, or the user's own function.
        key: Key for random draws. Passed to tasks that take one.
        shots: Train rows of each class. Default: all.
        new_classes: Number or share of the classes that no client trains on.
        together: Column whose equal values stay together if a test part is held out. Default: single rows are held out.
        **options: Options of the task.
    """
    given = {"key": key} if takes("data", name, "key") else {}
    with hold_out_groups(together):
        task: Task = make("data", name, options, **given)
    task = hold_out_classes(task, new_classes) if new_classes else task
    return task if shots is None else draw_shots(task, shots, key)
