"""The metrics of a run: their direction, their unit, and the format of their values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MISSING = "–"


@dataclass(frozen=True)
class Metric:
    """A score.

    Attributes:
        name: Name in rows and reports.
        higher_is_better: Direction.
        fraction: Whether all values are in [0, 1]. Reports show fractions in percent, and others as they are.
    """

    name: str
    higher_is_better: bool = True
    fraction: bool = True

    def worst_tenth(self, values: Sequence[float]) -> list[float]:
        """Return the worst tenth of the clients' values, at least one, the worst first."""
        return sorted(values, reverse=not self.higher_is_better)[: math.ceil(len(values) / 10)]

    @property
    def scale(self) -> float:
        """Factor from recorded to shown values."""
        return 100.0 if self.fraction else 1.0

    @property
    def title_with_unit(self) -> str:
        """Name with the unit."""
        return f"{self.name}, %" if self.fraction else self.name

    def text(self, value: float | None, sign: str = "") -> str:
        """Format a value without its unit, which the column heading shows. `sign` "+" marks positive values."""
        if value is None or not self.fraction:
            return short(value, sign)
        return f"{100 * value:{sign}.1f}".replace("-", "−")

    def show(self, value: float | None) -> str:
        """Format a value with its unit."""
        unit = "%" if self.fraction and value is not None else ""
        return self.text(value) + unit


ACCURACY = Metric("accuracy")

# For older runs, which record no metric but the one that judges them and the user's own ones.
_OF_OLDER_RUNS = {
    metric.name: metric
    for metric in (
        Metric("loss", higher_is_better=False, fraction=False),
        Metric("perplexity", higher_is_better=False, fraction=False),
        Metric("mse", higher_is_better=False, fraction=False),
        Metric("mae", higher_is_better=False, fraction=False),
        Metric("ece", higher_is_better=False),
        Metric("r2", fraction=False),
    )
}


def metrics_in(plan: Mapping[str, Any]) -> tuple[Metric, ...]:
    """Return all metrics of a run from its plan.json, first the one that judges the run.

    Older runs record "metric" and "own_metrics" instead of "metrics".
    """
    if "metrics" in plan:
        return tuple(Metric(**each) for each in plan["metrics"]) or (ACCURACY,)
    judged = plan.get("metric", {})
    name = judged.get("name", ACCURACY.name)
    known = _OF_OLDER_RUNS.get(name, Metric(name))
    higher = judged.get("higher_is_better", True)
    fraction = known.fraction if higher == known.higher_is_better else higher
    own = [Metric(**each) for each in plan.get("own_metrics", ())]
    found: dict[str, Metric] = {}
    for metric in (Metric(name, higher, fraction), *own, *_OF_OLDER_RUNS.values()):
        found.setdefault(metric.name, metric)
    return tuple(found.values())


def metric_named(name: str, known: Iterable[Metric]) -> Metric:
    """Return the metric of that name; a fraction of which higher values are better if it is not known."""
    return next((metric for metric in known if metric.name == name), Metric(name))


def short(value: float | None, sign: str = "") -> str:
    """Format a value with about three significant digits and no exponent. `sign` "+" marks positive values."""
    if value is None:
        return MISSING
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 or size == 0 else 4
    return f"{value:{sign},.{digits}f}".replace(",", " ").replace("-", "−")
