"""Bootstrap intervals of scores. Examples are drawn again with replacement, or whole groups of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from partita.core.rng import Key

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEVEL = 0.95
ENOUGH = 0.9  # share of the resamples in which a score must be defined for an interval
NUMBERS_TOGETHER = 2**23  # weights in memory at once


class Statistic(Protocol):
    """Scores as functions of the weights of examples."""

    def __len__(self) -> int:
        """The number of examples."""
        ...

    def __call__(self, weights: Floats) -> dict[str, Floats]:
        """Return each score for several weightings, (weighting,). A score is NaN where it is undefined.

        Args:
            weights: How often each example counts, (weighting, example).
        """
        ...

    def select(self, rows: Ints) -> Statistic:
        """Return the statistic of some examples."""
        ...


@dataclass(frozen=True)
class Interval:
    """A score with its bootstrap interval.

    Attributes:
        value: The score of all examples.
        low: Lower end of the interval; None if it is undefined.
        high: Upper end.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the score for JSON: "value", and "low" and "high" if there is an interval."""
        ends = {} if self.low is None or self.high is None else {"low": self.low, "high": self.high}
        return {"value": self.value, **ends}


def intervals(
    statistic: Statistic, resamples: int, key: Key, groups: Sequence[Any] | NDArray[Any] | None = None
) -> dict[str, Interval]:
    """Compute all scores with their percentile intervals of 95%.

    Args:
        statistic: The scores.
        resamples: Number of resamples; 0 for no intervals.
        key: Key for the draws.
        groups: The group of each example, such as its document or patient. Groups are then drawn, with all their
            examples. Default: examples are drawn.

    Returns:
        The scores that are defined. One has no interval if fewer than two groups could be drawn, if it is infinite, or
        if it is undefined in more than a tenth of the resamples.
    """
    count = len(statistic)
    whole = {name: float(values[0]) for name, values in statistic(np.ones((1, count))).items()}
    defined = [name for name, value in whole.items() if not np.isnan(value)]
    units = np.arange(count) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    if not resamples or len(np.unique(units)) < 2:
        return {name: Interval(whole[name]) for name in defined}
    parts = [statistic(weights) for weights in _weights(units, resamples, key)]
    found = {}
    for name in defined:
        values = np.concatenate([part[name] for part in parts])
        values = values[~np.isnan(values)]
        ends: list[float | None] = [None, None]
        if len(values) >= ENOUGH * resamples and np.isfinite(whole[name]):
            ends = np.percentile(values, [50 * (1 - LEVEL), 50 * (1 + LEVEL)]).tolist()
        found[name] = Interval(whole[name], *ends)
    return found


def _weights(units: Ints, resamples: int, key: Key) -> Iterator[Floats]:
    """Yield how often each example is drawn, (resample, example), some resamples at a time."""
    draw, count = np.random.default_rng(key.seed()), int(units.max()) + 1
    together = max(1, NUMBERS_TOGETHER // len(units))
    for start in range(0, resamples, together):
        drawn = draw.integers(0, count, (min(together, resamples - start), count))
        yield np.stack([np.bincount(row, minlength=count)[units] for row in drawn]).astype(np.float64)
