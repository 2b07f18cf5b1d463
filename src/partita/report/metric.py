"""What runs are judged by, and how its values are written."""

from __future__ import annotations

from dataclasses import dataclass

MISSING = "–"
LOWER = ("loss", "perplexity")  # of all other metrics, more is better


@dataclass(frozen=True)
class Metric:
    """Where more is better it is a share from 0 to 1, shown in percent; where less is better it is shown as it is.

    Runs that do not say are of a time when all were judged by accuracy.
    """

    name: str = "accuracy"
    higher_is_better: bool = True

    @property
    def scale(self) -> float:
        return 100.0 if self.higher_is_better else 1.0

    @property
    def titled(self) -> str:
        return f"{self.name}, %" if self.higher_is_better else self.name

    def text(self, value: float | None, sign: str = "") -> str:
        """For a column whose heading has the unit."""
        if value is None or not self.higher_is_better:
            return short(value, sign)
        return f"{100 * value:{sign}.1f}".replace("-", "−")

    def show(self, value: float | None) -> str:
        unit = "%" if self.higher_is_better and value is not None else ""
        return self.text(value) + unit


ACCURACY = Metric()


def short(value: float | None, sign: str = "") -> str:
    """Three significant digits, and never an exponent."""
    if value is None:
        return MISSING
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 or size == 0 else 4
    return f"{value:{sign},.{digits}f}".replace(",", " ").replace("-", "−")
