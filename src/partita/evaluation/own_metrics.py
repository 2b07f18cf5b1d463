"""Metrics from the user's own functions, next to those of the task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from partita.core.data import IGNORE_INDEX
from partita.core.own_code import short_name
from partita.core.registry import find_function
from partita.evaluation.metrics import EvaluationError, Evaluator, Metric, Predictions

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
        function = find_function({}, name, "metric")
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
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []

        def gather() -> Iterator[Predictions]:
            for batch in batches:
                seen.append((batch.logits.cpu(), batch.targets.cpu()))
                yield batch

        scores = self.evaluator(gather())
        logits, targets = join_batches([pair[0] for pair in seen]), join_batches([pair[1] for pair in seen])
        return {**scores, **self._own_scores(logits, targets)}

    def own_scores(self, batch: Predictions) -> dict[str, float]:
        """Return the scores of the user's own functions."""
        return self._own_scores(batch.logits, batch.targets)

    def _own_scores(self, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        values = {own.name: float(function(logits, targets)) for own, function in self.functions.items()}
        return {name: value for name, value in values.items() if not math.isnan(value)}  # NaN: undefined for these

    def decisions(self, batch: Predictions) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self.evaluator.decisions(batch)


def join_batches(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join batches (example, ...). Batches of texts can differ in length, and are padded at the end."""
    if len({part.shape[1:] for part in parts}) > 1:
        longest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
        parts = [_padded(part, longest) for part in parts]
    return torch.cat(list(parts))


def _padded(part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    # Targets are padded with the index that losses ignore.
    empty = part.new_full((part.shape[0], *sizes), 0 if part.is_floating_point() else IGNORE_INDEX)
    empty[tuple(slice(size) for size in part.shape)] = part
    return empty
