"""Metrics from the user's own functions, next to those of the task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from partita.core.own_code import short_name
from partita.core.registry import find_function
from partita.evaluation.evaluator import EvaluationError, Evaluator, Predictions
from partita.evaluation.outcomes import Outcomes, Recomputed, joined, outcomes
from partita.record.metric import Metric

MetricFunction = Callable[[torch.Tensor, torch.Tensor], float]  # (logits, targets) of all examples -> score
F = TypeVar("F", bound=MetricFunction)

_ATTRIBUTE = "partita_metric"


def metric(higher_is_better: bool = True, fraction: bool = True) -> Callable[[F], F]:
    """Mark a function as a metric whose values are not fractions, or of which lower values are better.

    Args:
        higher_is_better: Direction.
        fraction: Whether all values are in [0, 1]. Reports show fractions in percent.
    """

    def mark(function: F) -> F:
        setattr(function, _ATTRIBUTE, Metric(function.__name__, higher_is_better, fraction))
        return function

    return mark


def with_own_metrics(evaluator: Evaluator, names: Sequence[str]) -> Evaluator:
    """Return an evaluator that computes the user's own metrics too.

    Args:
        evaluator: The task's evaluator.
        names: The user's functions, such as "mine.py:recall".

    Raises:
        EvaluationError: If two metrics have the same name.
    """
    functions: dict[Metric, MetricFunction] = {}
    taken = {known.name for known in evaluator.metrics}
    for name in names:
        function = find_function("metric", name)
        own = getattr(function, _ATTRIBUTE, Metric(short_name(name)))
        if own.name in taken:
            raise EvaluationError(f"evaluate.metrics: there are two metrics '{own.name}'; rename '{name}'")
        taken.add(own.name)
        functions[own] = function
    return OwnMetrics(evaluator, functions) if functions else evaluator


@dataclass(frozen=True)
class OwnMetrics:
    """An evaluator and functions of all logits and targets."""

    evaluator: Evaluator
    functions: dict[Metric, MetricFunction]

    @property
    def primary(self) -> Metric:
        return self.evaluator.primary

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (*self.evaluator.metrics, *self.functions)

    @property
    def batch(self) -> int:
        return self.evaluator.batch

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]:
        seen: list[Predictions] = []
        scores = self.evaluator(_watched(batches, seen))
        return {**scores, **self.own_scores(joined(seen))}

    def outcomes(self, batches: Iterator[Predictions], classes: tuple[str, ...]) -> Outcomes:
        """Keep what a model does on each example, as `ByExample.outcomes` does."""
        seen: list[Predictions] = []
        made = outcomes(self.evaluator, _watched(batches, seen), classes)
        return replace(made, others=(*made.others, Recomputed(self.own_scores, joined(seen))))

    def own_scores(self, batch: Predictions) -> dict[str, float]:
        """Return the scores of the user's own functions."""
        values = {own.name: float(function(batch.logits, batch.targets)) for own, function in self.functions.items()}
        return {name: value for name, value in values.items() if not math.isnan(value)}  # NaN: undefined for these

    def decisions(self, batch: Predictions) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self.evaluator.decisions(batch)


def _watched(batches: Iterator[Predictions], seen: list[Predictions]) -> Iterator[Predictions]:
    for batch in batches:
        seen.append(Predictions(batch.logits.cpu(), batch.targets.cpu(), batch.losses.cpu()))
        yield batch
