"""Tests of what a mechanism did against what was charged: each p-value is exact for an honest mechanism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, chi2, kstest, norm
from scipy.stats import t as student

Array = NDArray[np.float64]
ALPHA = 1e-6  # chance that an honest run fails any of its checks
CONFIDENCE = 0.99  # of the intervals that are shown; the verdict is by the p-value alone
ROUNDING = 0.005  # a relative error of the noise below this is arithmetic, however many numbers show it


@dataclass(frozen=True)
class Check:
    """One property of a mechanism. `p` is corrected for the comparisons inside the check."""

    what: str
    charged: float
    found: float
    p: float
    numbers: int  # that the finding rests on
    interval: tuple[float, float] | None = None


def judge(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """Each check for the record, with the verdict at its share of the total significance."""
    return [
        {
            "what": each.what,
            "charged": each.charged,
            "found": each.found,
            "interval": None if each.interval is None else list(each.interval),
            "numbers": each.numbers,
            "p": each.p,
            "passed": each.p >= ALPHA / len(checks),
        }
        for each in checks
    ]


def check_deviation(what: str, charged: float, parts: Mapping[str, tuple[float, int]]) -> Check:
    """The standard deviation of Gaussian numbers, over all parts and in each: (sum of squares, count) by name.

    The squares are in units of the charged deviation.
    """
    whole = sum(square for square, _ in parts.values()), sum(count for _, count in parts.values())
    chances = [_chance_of_squares(square, count) for square, count in (whole, *parts.values())]
    squares, numbers = whole
    tail = (1 - CONFIDENCE) / 2
    low, high = (charged * float(np.sqrt(squares / chi2.ppf(side, numbers))) for side in (1 - tail, tail))
    found = charged * float(np.sqrt(squares / numbers))
    return Check(what, charged, found, min(1.0, min(chances) * len(chances)), numbers, (low, high))


def _chance_of_squares(squares: float, count: int) -> float:
    if abs(np.sqrt(squares / count) - 1) < ROUNDING:
        return 1.0
    return chance_of_either(chi2.cdf(squares, count), chi2.sf(squares, count))


def check_normality(what: str, numbers: Array) -> Check:
    """The largest distance between the empirical distribution and the standard normal one."""
    test = kstest(numbers, "norm")
    return Check(what, 0.0, float(test.statistic), float(test.pvalue), len(numbers))


def chance_of_cosine(cosine: Array, length: NDArray[np.int64]) -> Array:
    """Two-sided, for independent Gaussian vectors of zero mean. A single number has no direction to compare."""
    freedom = np.maximum(length - 1, 1)
    inside = np.clip(np.abs(cosine), 0, 1)
    with np.errstate(divide="ignore"):
        statistic = inside * np.sqrt(freedom / (1 - inside**2))
    return np.where(length > 1, 2 * student.sf(statistic, freedom), 1.0)


def check_counts(what: str, groups: Mapping[float, tuple[int, int]]) -> Check:
    """How often events happened: (count, trials) by the probability with which each trial should have."""
    chances = [
        chance_of_either(binom.cdf(count, trials, share), binom.sf(count - 1, trials, share))
        for share, (count, trials) in groups.items()
    ]
    happened, trials = (sum(group[side] for group in groups.values()) for side in (0, 1))
    charged = sum(share * tried for share, (_, tried) in groups.items()) / trials
    spread = sum(share * (1 - share) * tried for share, (_, tried) in groups.items())
    reach = float(norm.ppf((1 + CONFIDENCE) / 2)) * float(np.sqrt(spread)) / trials
    found = happened / trials
    return Check(what, charged, found, min(1.0, min(chances) * len(chances)), trials, (found - reach, found + reach))


def check_dispersion(sizes: NDArray[np.int64], counts: NDArray[np.int64], shares: Array) -> Check:
    """The variance of batch sizes, beside the binomial one of Poisson sampling.

    Each size becomes a standard normal number by its quantile, randomised inside the size's own probability, so that
    their squares are chi-squared exactly.
    """
    draw = np.random.default_rng(0).random(len(sizes))
    below, here = binom.cdf(sizes - 1, counts, shares), binom.pmf(sizes, counts, shares)
    scores = norm.ppf(np.clip(below + draw * here, 1e-300, 1 - 1e-16))
    squares = float(np.sum(scores**2))
    ratio = np.mean((sizes - counts * shares) ** 2 / (counts * shares * (1 - shares)))
    chance = chance_of_either(chi2.cdf(squares, len(sizes)), chi2.sf(squares, len(sizes)))
    return Check("variance of batch sizes / binomial", 1.0, float(ratio), chance, len(sizes))


def chance_of_either(below: float, above: float) -> float:
    return float(min(1.0, 2 * min(below, above)))
