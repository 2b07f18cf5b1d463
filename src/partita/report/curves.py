"""Values by round: mean and spread over the seeds of a label."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from partita.record.metric import Metric
from partita.report.load import Row, RunRecord, number, present, sent
from partita.report.tables import mean


@dataclass(frozen=True)
class Curve:
    """Mean and sample standard deviation over the seeds with a value after a round."""

    rounds: list[int]  # completed rounds, so the first is 1
    mean: list[float]  # mean over seeds
    sd: list[float]  # 0 if only one seed reached the round
    megabytes: list[float] | None  # sent up by all clients so far; None if bytes were not recorded
    seconds: list[float] | None  # so far; None if times were not recorded


def curve_by_round(runs: Sequence[RunRecord], value_of: Callable[[Row], float | None], scale: float = 1.0) -> Curve:
    """Compute the curve of one label.

    Args:
        runs: The runs of the label.
        value_of: Reads the value from a row; None if the row has none.
        scale: Factor from recorded to shown values.
    """
    by_round: dict[int, list[float]] = {}
    for run in runs:
        for row in run.rows:
            if (value := value_of(row)) is not None:
                by_round.setdefault(row["round"], []).append(scale * value)
    rounds = sorted(by_round)
    means = [fmean(by_round[round]) for round in rounds]
    return Curve(
        rounds=[round + 1 for round in rounds],
        mean=means,
        sd=[_deviation(by_round[round], center) for round, center in zip(rounds, means, strict=True)],
        megabytes=_at_rounds([_megabytes(run) for run in runs], rounds),
        seconds=_at_rounds([_seconds(run) for run in runs], rounds),
    )


def _deviation(values: Sequence[float], center: float) -> float:
    """Return the sample standard deviation. `statistics.stdev` computes with fractions, too slow for every round."""
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / max(1, len(values) - 1))


def curve_of(runs: Sequence[RunRecord], metric: Metric) -> Curve:
    """Compute the curve of a test metric, in display units."""
    return curve_by_round(runs, lambda row: number((row.get("test") or {}).get(metric.name)), metric.scale)


def _at_rounds(sums: Sequence[dict[int, float]], rounds: Sequence[int]) -> list[float] | None:
    """Return the mean over seeds of what was spent by the end of each round; None if a round has no value."""
    spent = [mean([by_run[round] for by_run in sums if round in by_run]) for round in rounds]
    return None if None in spent else present(spent)


def _megabytes(run: RunRecord) -> dict[int, float]:
    """Return the megabytes sent up by the end of each round. Empty if bytes were not recorded."""
    sums = accumulate(size / 1e6 for size in sent(run, "up") or ())
    return dict(zip((row["round"] for row in run.rows), sums, strict=False))


def _seconds(run: RunRecord) -> dict[int, float]:
    """Return the seconds by the end of each round. Empty if a row has none."""
    seconds = [number(row.get("seconds")) for row in run.rows]
    sums = accumulate(()) if None in seconds else accumulate(present(seconds))
    return dict(zip((row["round"] for row in run.rows), sums, strict=False))
