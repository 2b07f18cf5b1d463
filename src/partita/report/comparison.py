"""The results of a comparison of methods, without how they are computed or shown."""

from __future__ import annotations

from dataclasses import dataclass

from partita.report.metric import Metric


@dataclass(frozen=True)
class Difference:
    """Difference of a label to the first one, paired over `n` common seeds, with the 95% interval of Student's t."""

    n: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None  # set if there are at least three labels


@dataclass(frozen=True)
class Reach:
    """Rounds until the target is reached. Seeds that did not reach it count as infinitely late."""

    rounds: float | None  # median over seeds; None if it is infinite
    reached: int  # seeds that reached the target
    of: int  # all seeds


@dataclass(frozen=True)
class Gain:
    """Clients' gain over local training, over clients and common seeds."""

    mean: float  # higher is better for every metric
    better: float  # fraction of clients that gain


@dataclass(frozen=True)
class Line:
    """Results of one label. Values are as recorded, `_sd` is the sample standard deviation, None means unknown."""

    label: str
    seeds: tuple[int, ...]
    final: float | None
    final_sd: float | None
    stability: float | None
    personal: float | None
    personal_sd: float | None  # over clients
    personal_worst: float | None
    gain: Gain | None  # None if there is no local baseline, or this is it
    difference: Difference | None  # None in the first line
    up: float | None  # bytes per client and round
    down: float | None
    total_mb: float | None  # per run, both directions; 1 MB is 10^6 bytes
    reach: Reach | None
    seconds: float | None  # per round
    epsilon: float | None = None  # after the last round, largest over seeds


@dataclass(frozen=True)
class Comparison:
    """Results of all labels, with comments that explain them."""

    metric: str
    higher_is_better: bool
    target: float | None
    lines: tuple[Line, ...]
    comments: tuple[str, ...]


def worse_share(judge: Metric, reference: float) -> float:
    """Return the factor that makes a value 5% worse. It is the default target, relative to the first label's mean."""
    return 0.95 if judge.higher_is_better == (reference >= 0) else 1.05
