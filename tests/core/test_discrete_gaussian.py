"""The discrete Gaussian: exact probabilities, tails, keys, and decisions that do not depend on floating point."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import chi2, norm

from partita.core import discrete_gaussian as module
from partita.core.discrete_gaussian import DiscreteGaussianError, discrete_gaussian, is_below

KEYS = [bytes([number]) * 32 for number in range(4)]
VARIANCES = [Fraction(1, 10), Fraction(1, 2), Fraction(1), Fraction(5, 2), Fraction(9), Fraction(1000, 7)]


def probabilities(variance: Fraction) -> dict[int, float]:
    reach = 2 + math.ceil(12 * math.sqrt(variance))
    weights = {x: math.exp(-x * x / (2 * variance)) for x in range(-reach, reach + 1)}
    total = math.fsum(weights.values())
    return {x: weight / total for x, weight in weights.items()}


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("variance", VARIANCES, ids=str)
def test_draws_have_the_exact_probabilities(variance: Fraction) -> None:
    count = 200_000
    found = Counter(discrete_gaussian(KEYS[1], count, variance).tolist())
    wanted = probabilities(variance)
    cells = [x for x, probability in wanted.items() if probability * count >= 10]
    rest = 1 - math.fsum(wanted[x] for x in cells)
    pairs = [(found[x], wanted[x] * count) for x in cells]
    if rest * count >= 1:
        pairs.append((count - sum(found[x] for x in cells), rest * count))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in pairs)
    assert chi2.sf(statistic, len(pairs) - 1) > 1e-4


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("variance", [*VARIANCES, Fraction(10**8), Fraction(2**61 + 1, 3), Fraction(2**110)], ids=str)
def test_mean_variance_symmetry_and_tails(variance: Fraction) -> None:
    count, std = 200_000, math.sqrt(variance)
    draws = discrete_gaussian(KEYS[2], count, variance).astype(np.float64)
    exact = probabilities(variance) if variance < 10**4 else {}
    spread = math.sqrt(math.fsum(x * x * p for x, p in exact.items())) if exact else std
    assert spread <= std * (1 + 1e-9)
    assert abs(draws.mean()) < 5 * spread / math.sqrt(count)
    assert (draws**2).mean() / spread**2 == pytest.approx(1, abs=5 * math.sqrt(10 / count))
    assert abs(np.sum(draws > 0) - np.sum(draws < 0)) < 5 * math.sqrt(count)
    if variance >= 100:
        for far in (2.0, 3.0, 4.0):
            expected = 2 * norm.sf(far) * count
            assert abs(np.sum(np.abs(draws) > far * std) - expected) < 5 * math.sqrt(expected) + 0.05 * expected + 1


def test_same_key_gives_the_same_draws_and_other_keys_others() -> None:
    first, second = (discrete_gaussian(key, 1000, Fraction(10**6)) for key in KEYS[:2])
    assert (first == discrete_gaussian(KEYS[0], 1000, Fraction(10**6))).all()
    assert np.mean(first == second) < 0.01
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.15
    assert discrete_gaussian(KEYS[0], 0, Fraction(1)).shape == (0,)


@pytest.mark.parametrize(
    "variance", [Fraction(1, 10), Fraction(5, 2), Fraction(10**8), Fraction(2**100 + 1, 7)], ids=str
)
def test_exact_arithmetic_for_all_decisions_gives_the_same_draws(variance: Fraction) -> None:
    """Float64 only saves time."""
    fast, exact = (discrete_gaussian(KEYS[3], 300, variance, margin) for margin in (module.MARGIN, 1.0))
    assert (fast == exact).all()


def test_too_small_margin_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If float64 decided wrongly, the two ways would differ: exp with an error of 1% does."""
    exp = np.exp
    monkeypatch.setattr(np, "exp", lambda x: 1.01 * exp(x))
    fast, exact = (discrete_gaussian(KEYS[3], 3000, Fraction(10**8), margin) for margin in (0.0, 0.02))
    assert (fast != exact).any()


def test_comparison_draws_more_bits_until_it_can_decide() -> None:
    digits = 367879441171442321595523770161460867445811131031767834507836801  # 63 digits of exp(-1)
    exact = 2**64 * digits // 10**63
    assert is_below(exact - 1, Fraction(1), KEYS[0])
    assert not is_below(exact + 1, Fraction(1), KEYS[0])
    # Exactly on the first 64 bits of exp(-1), the following bits decide: both happen, with their probabilities.
    rest = 2**64 * digits % 10**63 / 10**63
    found = [is_below(exact, Fraction(1), number.to_bytes(32, "big")) for number in range(400)]
    assert abs(sum(found) - 400 * rest) < 5 * math.sqrt(400 * rest * (1 - rest))
    assert is_below(2**64 - 1, Fraction(0), KEYS[0]), "exp(0) is 1"
    assert not is_below(1, Fraction(1000), KEYS[0])


def test_tied_quotients_are_decided_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that equal a threshold, or are 0, are between two quotients."""
    thresholds = module._thresholds()
    size = 64
    tied = np.zeros((3, size), np.uint64)
    tied[1, :32] = thresholds[-1]  # floor(2**64 exp(-1)): the quotient is 0 or 1
    monkeypatch.setattr(module.chacha, "integers", lambda key, count: tied.reshape(-1))
    draws = module._pass(KEYS[0], size, Fraction(10**6), 10, module.MARGIN)
    assert set(draws[:32].tolist()) == {0, 1024}
    assert (draws[32:] >= 44 * 1024).all(), "a word of 0 is below exp(-44)"


@pytest.mark.parametrize("variance", [Fraction(0), Fraction(-1), Fraction(2**113)])
def test_impossible_variance_is_refused(variance: Fraction) -> None:
    with pytest.raises(DiscreteGaussianError, match=r"it must be above 0 and at most 2\*\*112"):
        discrete_gaussian(KEYS[0], 3, variance)


def test_candidates_are_accepted_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PASS", 100)
    draws = discrete_gaussian(KEYS[0], 1000, Fraction(4))
    assert draws.shape == (1000,)
    assert draws.dtype == np.int64
    assert abs(np.corrcoef(draws[:500], draws[500:])[0, 1]) < 0.2
