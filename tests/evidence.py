"""Statistical tests of a mechanism against what was charged. Each p-value is exact for an honest mechanism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, chi2, kstest, norm
from scipy.stats import t as student

Array = NDArray[np.float64]
ALPHA = 1e-6  # probability that an honest run fails any of its checks
CONFIDENCE = 0.99  # of the reported intervals; the verdict uses only the p-value
ROUNDING = 0.005  # a relative error of the noise below this is attributed to rounding, whatever the sample size


@dataclass(frozen=True)
class Check:
    """Test of one property of a mechanism."""

    what: str  # name of the check
    charged: float  # expected value
    found: float  # measured value
    p: float  # corrected for the comparisons inside the check
    numbers: int  # sample size
    interval: tuple[float, float] | None = None  # confidence interval of `found`


def judge(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """Convert the checks for the record, with verdicts at the Bonferroni-corrected level ALPHA / len(checks)."""
    return [
        {
            "what": check.what,
            "charged": check.charged,
            "found": check.found,
            "interval": None if check.interval is None else list(check.interval),
            "numbers": check.numbers,
            "p": check.p,
            "passed": check.p >= ALPHA / len(checks),
        }
        for check in checks
    ]


def check_deviation(what: str, charged: float, parts: Mapping[str, tuple[float, int]]) -> Check:
    """Test the standard deviation of Gaussian samples, over all parts and in each part.

    Args:
        what: Name of the check.
        charged: The charged standard deviation.
        parts: (sum of squares, count) by name. The squares are in units of the charged variance.
    """
    total = sum(square for square, _ in parts.values()), sum(count for _, count in parts.values())
    chances = [_chance_of_squares(square, count) for square, count in (total, *parts.values())]
    squares, numbers = total
    tail = (1 - CONFIDENCE) / 2
    low, high = (charged * float(np.sqrt(squares / chi2.ppf(side, numbers))) for side in (1 - tail, tail))
    measured = charged * float(np.sqrt(squares / numbers))
    return Check(what, charged, measured, min(1.0, min(chances) * len(chances)), numbers, (low, high))


def _chance_of_squares(squares: float, count: int) -> float:
    if abs(np.sqrt(squares / count) - 1) < ROUNDING:
        return 1.0
    return chance_of_either(chi2.cdf(squares, count), chi2.sf(squares, count))


def check_normality(what: str, numbers: Array) -> Check:
    """Test samples against the standard normal distribution with the Kolmogorov-Smirnov distance.

    Args:
        what: Name of the check.
        numbers: Samples, (sample,).
    """
    test = kstest(numbers, "norm")
    return Check(what, 0.0, float(test.statistic), float(test.pvalue), len(numbers))


def chance_of_cosine(cosine: Array, length: NDArray[np.int64]) -> Array:
    """Return two-sided p-values of cosines between independent, zero-mean Gaussian vectors.

    Args:
        cosine: The cosines.
        length: Dimensions of the vectors. Dimension 1 gives p = 1, because a scalar has no direction to compare.
    """
    freedom = np.maximum(length - 1, 1)
    inside = np.clip(np.abs(cosine), 0, 1)
    with np.errstate(divide="ignore"):
        statistic = inside * np.sqrt(freedom / (1 - inside**2))
    return np.where(length > 1, 2 * student.sf(statistic, freedom), 1.0)


def check_counts(what: str, groups: Mapping[float, tuple[int, int]]) -> Check:
    """Test event counts against binomial distributions.

    Args:
        what: Name of the check.
        groups: (count, trials) by the charged probability of the event.
    """
    chances = [
        chance_of_either(binom.cdf(count, trials, share), binom.sf(count - 1, trials, share))
        for share, (count, trials) in groups.items()
    ]
    events, trials = (sum(group[side] for group in groups.values()) for side in (0, 1))
    charged = sum(share * tried for share, (_, tried) in groups.items()) / trials
    spread = sum(share * (1 - share) * tried for share, (_, tried) in groups.items())
    reach = float(norm.ppf((1 + CONFIDENCE) / 2)) * float(np.sqrt(spread)) / trials
    measured = events / trials
    interval = (measured - reach, measured + reach)
    return Check(what, charged, measured, min(1.0, min(chances) * len(chances)), trials, interval)


def check_dispersion(sizes: NDArray[np.int64], counts: NDArray[np.int64], shares: Array) -> Check:
    """Test the variance of batch sizes against the binomial variance of Poisson sampling.

    Each size is mapped to a standard normal score by its quantile, randomized within the probability of that size.
    The sum of squared scores is then exactly chi-squared.

    Args:
        sizes: Batch sizes, (batch,).
        counts: The number of examples that each batch was drawn from, (batch,).
        shares: The charged probability of an example in each batch, (batch,).
    """
    draw = np.random.default_rng(0).random(len(sizes))
    below, here = binom.cdf(sizes - 1, counts, shares), binom.pmf(sizes, counts, shares)
    scores = norm.ppf(np.clip(below + draw * here, 1e-300, 1 - 1e-16))
    squares = float(np.sum(scores**2))
    ratio = np.mean((sizes - counts * shares) ** 2 / (counts * shares * (1 - shares)))
    chance = chance_of_either(chi2.cdf(squares, len(sizes)), chi2.sf(squares, len(sizes)))
    return Check("variance of batch sizes / binomial", 1.0, float(ratio), chance, len(sizes))


def chance_of_either(below: float, above: float) -> float:
    """Return the two-sided p-value of the tail probabilities `below` and `above`."""
    return float(min(1.0, 2 * min(below, above)))
