"""Evaluate a model on a set of examples."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from partita.core import tensors
from partita.core.data import Examples
from partita.core.model import Model
from partita.core.tensors import Tensors
from partita.evaluation.metrics import Accuracy, EvaluationError, Evaluator, Metric, Predictions

__all__ = ["ACCURACY", "EvaluationError", "Evaluator", "Metric", "score"]

ACCURACY = Accuracy()


def score(model: Model, params: Tensors, examples: Examples, evaluator: Evaluator = ACCURACY) -> dict[str, float]:
    """Return the scores of a model by name. An empty set of examples has none.

    Args:
        model: The model.
        params: All its parameters, on the device to evaluate on.
        examples: The examples to evaluate on.
        evaluator: Computes the scores; `task.kind.evaluator(task.classes)` is the one of a task.
    """
    return evaluator(_predictions(model, params, examples, evaluator.batch)) if len(examples) else {}


@torch.inference_mode()
def _predictions(model: Model, params: Tensors, examples: Examples, size: int) -> Iterator[Predictions]:
    device = next(iter(params.values())).device
    for indices in torch.arange(len(examples)).split(size):
        batch = examples.take(indices)
        targets = batch.targets.to(device)
        out = model(params, tensors.to(batch.inputs, device))
        yield Predictions(out.logits, targets, model.losses(out, targets))
