"""The noise of descriptions has the distribution that its privacy rests on."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from random import Random

import pytest
from scipy import stats

from partita.site.description.noise import discrete_laplace

DRAWS = 20_000


def probability(value: int, scale: float) -> float:
    ratio = math.exp(-1 / scale)
    return (1 - ratio) / (1 + ratio) * ratio ** abs(value)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("scale", [Fraction(1, 2), Fraction(1), Fraction(7, 3), Fraction(12)])
def test_draws_follow_the_discrete_laplace_distribution(scale: Fraction) -> None:
    random = Random(1)
    counts = Counter(discrete_laplace(scale, random.randrange) for _ in range(DRAWS))
    reach = max(1, round(3 * scale))
    inner = range(-reach, reach + 1)
    expected = [DRAWS * probability(value, float(scale)) for value in inner]
    observed = [counts[value] for value in inner]
    expected.append(DRAWS - sum(expected))
    observed.append(DRAWS - sum(observed))
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_neighbors_are_as_close_as_epsilon_says() -> None:
    """The defining inequality, on the distribution itself: ratios of neighbors never exceed exp(1 / scale)."""
    for scale in (0.5, 3.0, 40.0):
        for value in range(-100, 100):
            ratio = probability(value, scale) / probability(value + 1, scale)
            assert ratio <= math.exp(1 / scale) * (1 + 1e-9)


def test_operating_system_draws_the_noise_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {discrete_laplace(Fraction(1000)) for _ in range(20)}
    assert len(drawn) > 10
