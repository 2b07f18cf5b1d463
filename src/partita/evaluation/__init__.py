"""How good a model is on a set of examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from partita.core import tensors
from partita.core.data import Examples
from partita.core.model import Model
from partita.core.tensors import Tensors
from partita.evaluation.metrics import (
    Accuracy,
    Answers,
    Entities,
    MeasureError,
    Metric,
    MultiLabel,
    NextToken,
    SingleLabel,
)

__all__ = ["ACCURACY", "Measure", "MeasureError", "Metric", "measure_for", "score"]


class Measure(Protocol):
    """Makes scores of a model's answers, batch after batch; a score that is not defined on them is left out."""

    @property
    def primary(self) -> Metric: ...

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all scores that it can make."""
        ...

    @property
    def batch(self) -> int: ...

    def __call__(self, batches: Iterator[Answers]) -> dict[str, float]: ...


class Task(Protocol):
    """What decides how answers are judged."""

    @property
    def kind(self) -> str: ...

    @property
    def multi_label(self) -> bool: ...

    @property
    def classes(self) -> tuple[str, ...]: ...


ACCURACY = Accuracy()


def measure_for(task: Task) -> Measure:
    if task.kind == "tokens":
        return Entities(task.classes)
    if task.kind == "lm":
        return NextToken()
    if task.multi_label:
        return MultiLabel()
    return SingleLabel() if task.kind == "text" else ACCURACY


def score(model: Model, params: Tensors, examples: Examples, measure: Measure = ACCURACY) -> dict[str, float]:
    """The measure's scores by name; an empty set has none."""
    return measure(_answers(model, params, examples, measure.batch)) if len(examples) else {}


@torch.inference_mode()
def _answers(model: Model, params: Tensors, examples: Examples, size: int) -> Iterator[Answers]:
    device = next(iter(params.values())).device
    for indices in torch.arange(len(examples)).split(size):
        batch = examples.take(indices)
        targets = batch.targets.to(device)
        out = model(params, tensors.to(batch.inputs, device))
        yield Answers(out.logits, targets, model.losses(out, targets))
