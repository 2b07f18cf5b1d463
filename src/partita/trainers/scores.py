"""The scores that Trainers and the central test compute themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from partita.core.settings import RunError
from partita.evaluation.evaluator import Predictions
from partita.record.metric import Metric
from partita.trainers.engine import Test, run_test


@dataclass(frozen=True)
class OwnScores:
    """The scores that Trainers and the central test compute themselves. The first metric judges the run."""

    metrics: tuple[Metric, ...]
    batch: int = 1

    @property
    def primary(self) -> Metric:
        return self.metrics[0]

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]:
        raise RunError("the data of this run is with its Trainers, which score it themselves")

    def decisions(self, batch: Predictions) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None

    def named(self, name: str) -> Metric:
        """Return the metric of a score, which a Trainer may call as it likes. Its range is not known."""
        return Metric(name, not _is_loss(name), fraction=False)


def scores_of(test: Test | None, trainer: Any) -> OwnScores:
    """Return the evaluator of a run. A central test is called once, to learn the names of its scores."""
    names = run_test(test, trainer) if test else ()
    metrics = [Metric(name, not _is_loss(name), not _is_loss(name)) for name in names]
    loss = Metric("loss", higher_is_better=False, fraction=False)
    return OwnScores(tuple(dict.fromkeys([*metrics, loss])))


def _is_loss(name: str) -> bool:
    return any(part in name for part in ("loss", "perplexity", "error", "mse", "mae"))
