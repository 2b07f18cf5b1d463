"""What an evaluator gets and returns: predictions, and scores by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from partita.record.metric import Metric


class EvaluationError(ValueError):
    """A score cannot be computed."""


@dataclass(frozen=True)
class Predictions:
    """Logits, targets and losses of a batch.

    Attributes:
        logits: The model's logits, (example, ...).
        targets: The targets, (example, ...).
        losses: The loss of each example, (example,).
    """

    logits: torch.Tensor
    targets: torch.Tensor
    losses: torch.Tensor


class Evaluator(Protocol):
    """Computes scores from batches of predictions. Scores that are undefined for the examples are omitted.

    Besides its `metrics`, an evaluator may return scores of single entity types, named as by `type_score`. They say
    more about the examples than other scores, so they are computed everywhere but leave no client.
    """

    @property
    def primary(self) -> Metric:
        """The metric that a run is judged by."""
        ...

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """All metrics that it can return."""
        ...

    @property
    def batch(self) -> int:
        """The batch size for evaluation."""
        ...

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]: ...

    def decisions(self, batch: Predictions) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what is predicted and what is true, each (decision, ...); None if nothing is classified.

        A decision is the class of an example or of a token, or the set of labels of an example.
        """
        ...


@runtime_checkable
class OpenEvaluator(Protocol):
    """An evaluator that may return scores of any name."""

    def named(self, name: str) -> Metric:
        """Return the metric of this name."""
        ...


_SEPARATOR = "/"  # no metric has it in its name


def type_score(metric: str, entity_type: str) -> str:
    """Return the name of a score of one entity type."""
    return f"{metric}{_SEPARATOR}{entity_type}"


def without_types(scores: Mapping[str, float]) -> dict[str, float]:
    """Return the scores that are not of a single entity type."""
    return {name: value for name, value in scores.items() if _SEPARATOR not in name}


def by_type(scores: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the scores of single entity types, by type and metric. "entities" is the number of true entities."""
    types: dict[str, dict[str, float]] = {}
    for name, value in scores.items():
        metric, separator, entity_type = name.partition(_SEPARATOR)
        if separator:
            types.setdefault(entity_type, {})[metric] = value
    return types
