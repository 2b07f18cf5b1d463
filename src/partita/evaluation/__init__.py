"""Evaluate a model on a set of examples."""

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
    Entities,
    EvaluationError,
    Metric,
    MultiLabel,
    NextToken,
    Predictions,
    SingleLabel,
)

__all__ = ["ACCURACY", "EvaluationError", "Evaluator", "Metric", "evaluator_for", "score"]


class Evaluator(Protocol):
    """Computes scores from batches of predictions. Scores that are undefined for the examples are omitted."""

    @property
    def primary(self) -> Metric:
        """The metric that a run is judged by."""
        ...

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all scores that it can return."""
        ...

    @property
    def batch(self) -> int:
        """The batch size for evaluation."""
        ...

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]: ...


class Task(Protocol):
    """Task properties that decide which evaluator is used."""

    @property
    def kind(self) -> str: ...

    @property
    def multi_label(self) -> bool: ...

    @property
    def classes(self) -> tuple[str, ...]: ...


ACCURACY = Accuracy()


def evaluator_for(task: Task) -> Evaluator:
    """Return the evaluator for a task."""
    if task.kind == "tokens":
        return Entities(task.classes)
    if task.kind == "lm":
        return NextToken()
    if task.multi_label:
        return MultiLabel()
    return SingleLabel() if task.kind == "text" else ACCURACY


def score(model: Model, params: Tensors, examples: Examples, evaluator: Evaluator = ACCURACY) -> dict[str, float]:
    """Return the scores of a model by name. An empty set of examples has none."""
    return evaluator(_predictions(model, params, examples, evaluator.batch)) if len(examples) else {}


@torch.inference_mode()
def _predictions(model: Model, params: Tensors, examples: Examples, size: int) -> Iterator[Predictions]:
    device = next(iter(params.values())).device
    for indices in torch.arange(len(examples)).split(size):
        batch = examples.take(indices)
        targets = batch.targets.to(device)
        out = model(params, tensors.to(batch.inputs, device))
        yield Predictions(out.logits, targets, model.losses(out, targets))
