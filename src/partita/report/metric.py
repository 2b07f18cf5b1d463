"""The metric by which runs are compared, and the format of its values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MISSING = "–"
LOWER = ("loss", "perplexity", "mse", "mae", "ece")  # lower is better; for all other metrics higher is better
UNBOUNDED = ("r2",)  # higher is better, but values can be negative
LOWER_FRACTIONS = ("ece",)  # lower is better, and values are from 0 to 1


@dataclass(frozen=True)
class Metric:
    """A metric of test results.

    Old runs that record no metric use accuracy, the only metric at that time.
    """

    name: str = "accuracy"
    higher_is_better: bool = True  # direction
    recorded_fraction: bool | None = None  # for a user's own metric: whether its values are from 0 to 1

    @property
    def fraction(self) -> bool:
        """Whether values are from 0 to 1 and shown in percent. Others are shown as they are."""
        if self.recorded_fraction is not None:
            return self.recorded_fraction
        return self.name in LOWER_FRACTIONS or (self.higher_is_better and self.name not in UNBOUNDED)

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


ACCURACY = Metric()


def metric_named(name: str, recorded: Iterable[Metric] = ()) -> Metric:
    """Return the metric of that name: one of `recorded`, or else a built-in metric."""
    return next((metric for metric in recorded if metric.name == name), Metric(name, name not in LOWER))


def short(value: float | None, sign: str = "") -> str:
    """Format a value with about three significant digits and no exponent. `sign` "+" marks positive values."""
    if value is None:
        return MISSING
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 or size == 0 else 4
    return f"{value:{sign},.{digits}f}".replace(",", " ").replace("-", "−")
