"""The results of a comparison of methods, without how they are computed or shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from partita.record.metric import Metric


@dataclass(frozen=True)
class Difference:
    """Difference of a label to the first one, paired over `n` common seeds, with the 95% interval of Student's t."""

    n: int
    mean: float | None = None  # mean difference
    low: float | None = None  # lower end of the interval
    high: float | None = None  # upper end of the interval
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
class Score:
    """Final value of one metric over seeds. None means unknown."""

    mean: float | None
    sd: float | None  # sample standard deviation


@dataclass(frozen=True)
class Line:
    """Results of one label. Values are as recorded, `_sd` is the sample standard deviation, None means unknown."""

    label: str
    seeds: tuple[int, ...]  # seeds of the runs
    final: float | None  # value of the last tested round, mean over seeds
    final_sd: float | None  # over seeds
    stability: float | None  # standard deviation over the last quarter of the rounds, mean over seeds
    personal: float | None  # on the clients' own test sets, mean over clients and seeds
    personal_sd: float | None  # over clients
    personal_worst: float | None  # mean over the worst tenth of the clients
    gain: Gain | None  # None if there is no local baseline, or this is it
    difference: Difference | None  # None in the first line
    up: float | None  # bytes per client and round
    down: float | None  # bytes per client and round
    total_mb: float | None  # per run, both directions; 1 MB is 10^6 bytes
    reach: Reach | None
    seconds: float | None  # per round
    epsilon: float | None = None  # after the last round, largest over seeds
    scores: Mapping[str, Score] = field(default_factory=dict)  # final value of every recorded metric, by name


@dataclass(frozen=True)
class Comparison:
    """Results of all labels, with comments that explain them."""

    metric: str  # name of the metric
    higher_is_better: bool  # direction of the metric
    target: float | None  # value to reach; None if there is none
    lines: tuple[Line, ...]
    comments: tuple[str, ...]
    metrics: tuple[Metric, ...]  # the one that is compared, and those of the other scores


def worse_share(metric: Metric, reference: float) -> float:
    """Return the factor that makes `reference` 5% worse in the metric.

    The default target is the first label's mean times this factor.
    """
    return 0.95 if metric.higher_is_better == (reference >= 0) else 1.05
