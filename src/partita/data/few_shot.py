"""Tasks of fewer examples or classes: k examples of each class, and classes that no client trains on."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from partita.core.data import NewClasses
from partita.core.rng import Key
from partita.data.choice_examples import ChoiceExamples
from partita.data.errors import DataError
from partita.data.image_reader import ImagesOnDisk, ReadAhead
from partita.data.seq2seq_examples import Seq2SeqExamples
from partita.data.task import Rows, Table, Task


def select_rows(examples: Rows, rows: torch.Tensor) -> Rows:
    """Return a table of some rows, in the given order.

    Raises:
        DataError: If texts are cut into windows, so that a row is not an example.
    """
    if isinstance(examples, ImagesOnDisk):
        chosen = rows if examples.images is None else examples.images[rows]
        return replace(examples, images=chosen, targets=examples.targets[rows], ahead=ReadAhead())
    assert not isinstance(examples, Seq2SeqExamples | ChoiceExamples), "it has no classes"
    if isinstance(examples, Table):
        inputs = {name: value[rows] for name, value in examples.inputs.items()}
        return replace(examples, inputs=inputs, targets=examples.targets[rows])
    if examples.documents is not None:
        raise DataError(
            "data.shots and data.new_classes do not work with data.long_texts = 'windows'; set it to 'cut' or 'error'"
        )
    lengths = examples.offsets.diff()[rows]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    shift = torch.repeat_interleave(examples.offsets[rows] - offsets[:-1], lengths)
    places = torch.arange(int(offsets[-1])) + shift  # where each token was
    targets = examples.targets[places if examples.each_token else rows]
    segments = None if examples.segments is None else examples.segments[places]
    return replace(examples, ids=examples.ids[places], offsets=offsets, targets=targets, segments=segments)


def draw_shots(task: Task, shots: int, key: Key) -> Task:
    """Return the task with at most `shots` train rows of each class, all clients together.

    Args:
        task: The task. It must have one class per example.
        shots: Rows of each class. A class that has fewer keeps all of them, with a warning.
        key: Key for the draws. With the same key, fewer shots are a part of more shots.
    """
    labels = torch.from_numpy(_labels(task, "data.shots"))
    drawn, short = [], []
    for number, name in enumerate(task.classes):
        rows = (labels == number).nonzero().flatten()
        if len(rows) < shots:
            short.append(name)
        drawn.append(rows[(key / "shots" / str(number)).permutation(len(rows))[:shots]])
    if short:
        warnings.warn(
            f"{len(short)} of {len(task.classes)} classes of {task.name} have fewer than data.shots = {shots} train "
            f"rows, the first is '{short[0]}'; all of their rows are used",
            stacklevel=3,
        )
    return _with_train_rows(task, torch.cat(drawn).sort().values)


def hold_out_classes(task: Task, new: float) -> Task:
    """Return the task without some classes, which become its `new` classes.

    As in the literature on prompts, the first classes stay and the last ones are new. Train rows of new classes are
    dropped; test rows of new classes are kept apart.

    Args:
        task: The task. It must have one class per example.
        new: Number of new classes, or a share with a decimal point, rounded down.

    Raises:
        DataError: If fewer than two classes of either kind would be left, or if one kind has no test rows.
    """
    labels = _labels(task, "data.new_classes")
    count = math.floor(len(task.classes) * new) if isinstance(new, float) else new
    kept = len(task.classes) - count
    if min(count, kept) < 2:
        raise DataError(
            f"data.new_classes = {new} of {len(task.classes)} classes leaves {kept} to train on and {count} new; both "
            "need at least 2"
        )
    targets = task.test.targets
    test_rows = {"base": (targets < kept).nonzero().flatten(), "new": (targets >= kept).nonzero().flatten()}
    for name, rows in test_rows.items():
        if not len(rows):
            raise DataError(f"data.new_classes = {new}: {task.name} has no test rows of {name} classes; add some")
    held: Any = select_rows(task.test, test_rows["new"])
    held = replace(held, targets=held.targets - kept)
    smaller = _with_train_rows(task, torch.from_numpy(np.flatnonzero(labels < kept)))
    return replace(
        smaller,
        test=select_rows(task.test, test_rows["base"]),
        test_columns={name: values[test_rows["base"].numpy()] for name, values in task.test_columns.items()},
        classes=task.classes[:kept],
        new=NewClasses(held, task.classes[kept:]),
    )


def _labels(task: Task, option: str) -> Any:
    if not task.kind.one_class:
        raise DataError(f"{option} needs one class per example, which {task.name} does not have; leave it out")
    return task.labels()


def _with_train_rows(task: Task, rows: torch.Tensor) -> Task:
    columns = {name: values[rows.numpy()] for name, values in task.columns.items()}
    return replace(task, train=select_rows(task.train, rows), columns=columns)
