"""Membership inference against plain loops: curves, likelihood ratios and the bound that right guesses prove."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

from partita.privacy import membership
from partita.privacy.membership import (
    Roc,
    best_guesses,
    bound_epsilon,
    chance_of,
    confidence_of,
    likelihood_ratios,
    roc,
)


def test_a_curve_has_one_point_for_each_score() -> None:
    """A score that several examples have passes for all of them at once."""
    found = roc([3.0, 2.0, 2.0, 1.0], [2.0, 0.0, 0.0, 0.0, 0.0])
    assert found.false.tolist() == [0.0, 0.0, 0.2, 0.2, 1.0]
    assert found.true.tolist() == [0.0, 0.25, 0.75, 1.0, 1.0]
    assert (found.members, found.non_members) == (4, 5)
    assert found.auc == pytest.approx(0.2 * (0.25 + 0.75) / 2 + 0.8)
    assert (found.true_at(0.0), found.true_at(0.19), found.true_at(0.2), found.true_at(1.0)) == (0.25, 0.25, 1.0, 1.0)


def test_a_curve_is_recorded_with_few_points_and_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    third = 1 / 3
    curve = Roc(np.array([0.0, 0.009, third, 2 * third, 1.0]), np.array([0.0, third, third, 2 * third, 1.0]), 3, 4)
    assert curve.about() == {
        "auc": round(0.009 * third / 2 + (third - 0.009) * third + third * (third + 2 * third) / 2 + third * 5 / 6, 4),
        "true_at_1%": 0.3333,
        "members": 3,
        "outsiders": 4,
        "false": [0.0, 0.009, 0.3333, 0.6667, 1.0],
        "true": [0.0, 0.3333, 0.3333, 0.6667, 1.0],
    }
    monkeypatch.setattr(membership, "POINTS", 3)
    assert curve.about()["false"] == [0.0, 0.3333, 1.0]
    assert curve.about()["true"] == [0.0, 0.3333, 1.0]


def chance_by_hand(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Theorem 5.2 of Steinke, Nasr and Jagielski (2023), term by term."""
    accuracy = math.exp(epsilon) / (1 + math.exp(epsilon))
    exactly = [math.comb(guesses, k) * accuracy**k * (1 - accuracy) ** (guesses - k) for k in range(guesses + 1)]
    most, below = 0.0, 0.0
    for i in range(1, right + 1):
        below += exactly[right - i]
        most = max(most, below / i)
    return min(1.0, sum(exactly[right:]) + 2 * canaries * delta * most)


@pytest.mark.parametrize("delta", [0.0, 1e-3, 0.02, 0.5])
@pytest.mark.parametrize(("guesses", "right"), [(10, 10), (10, 8), (10, 5), (6, 1), (6, 0)])
def test_the_chance_of_right_guesses_is_that_of_the_theorem(guesses: int, right: int, delta: float) -> None:
    for epsilon in (0.0, 0.5, 3.0):
        wanted = chance_by_hand(12, guesses, right, epsilon, delta)
        assert chance_of(12, guesses, right, epsilon, delta) == pytest.approx(wanted, rel=1e-9)


def bound_by_hand(scores: list[float], included: list[bool], delta: float, confidence: float) -> tuple[float, int, int]:
    """(Epsilon, guesses, right): the largest of up to four bounds, each found by halving an interval."""
    count = len(scores)
    order = sorted(range(count), key=lambda place: scores[place])
    halves = sorted({max(1, math.floor(count * part)) for part in (0.05, 0.125, 0.25, 0.5)})
    risk, found = (1 - confidence) / len(halves), []
    for half in halves:
        right = sum(not included[place] for place in order[:half]) + sum(included[place] for place in order[-half:])
        low, high = 0.0, 32.0
        for _ in range(30):
            middle = (low + high) / 2
            likely = chance_by_hand(count, 2 * half, right, middle, delta) >= risk
            low, high = (low, middle) if likely else (middle, high)
        found.append((round(low, 5), 2 * half, right))
    return max(found, key=lambda one: (one[0], -one[1]))


@pytest.mark.parametrize("count", [4, 23, 40])
@pytest.mark.parametrize("delta", [0.0, 1e-4])
@pytest.mark.parametrize("leak", [0.4, 3.0])
def test_a_bound_is_the_largest_of_four_numbers_of_guesses(count: int, delta: float, leak: float) -> None:
    draw = np.random.default_rng(count)
    included = draw.random(count) < 0.5
    scores = draw.standard_normal(count) + leak * included
    found = bound_epsilon(scores, included, delta, 0.9)
    epsilon, guesses, right = bound_by_hand(scores.tolist(), included.tolist(), delta, 0.9)
    assert found.epsilon == pytest.approx(epsilon, abs=1e-4)
    assert (found.guesses, found.right) == (guesses, right)
    assert (found.canaries, found.delta, found.confidence) == (count, delta, 0.9)
    assert found.about()["guesses"] == guesses


def test_guesses_are_a_tenth_a_quarter_a_half_and_all_of_the_canaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among equal scores, the canaries that come first are taken to be out."""
    asked = []
    monkeypatch.setattr(membership, "_least_epsilon", lambda *terms: asked.append(terms) or 0.0)
    included = np.random.default_rng(0).random(400) < 0.5
    for scores in (np.zeros(400), np.arange(400) % 2.0):
        asked.clear()
        bound_epsilon(scores, included, 1e-4, 0.9)
        order = sorted(range(400), key=lambda place: scores[place])
        right = [
            sum(not included[place] for place in order[:half]) + sum(included[place] for place in order[-half:])
            for half in (20, 50, 100, 200)
        ]
        wanted = zip((40, 100, 200, 400), right, strict=True)
        assert asked == [(400, guesses, hits, 1e-4, pytest.approx(0.1 / 4)) for guesses, hits in wanted]


def test_the_best_of_several_attacks_pays_for_all() -> None:
    draw = np.random.default_rng(2)
    included = draw.random(100) < 0.5
    weak, strong = (draw.standard_normal(100) + leak * included for leak in (1.0, 6.0))
    for rows in ((weak, strong), (strong, weak), (strong, weak, weak)):
        scores, bound = best_guesses(np.stack(rows), included, 1e-4, 0.9)
        assert np.array_equal(scores, strong)
        assert bound == replace(bound_epsilon(strong, included, 1e-4, 1 - 0.1 / len(rows)), confidence=0.9)
    nothing = np.stack([-strong, -weak])
    scores, bound = best_guesses(nothing, included, 1e-4)
    assert np.array_equal(scores, -strong), "of attacks that prove nothing, the first"
    assert (bound.epsilon, bound.confidence) == (0.0, 0.95)


def test_likelihood_ratios_are_those_of_two_normals_with_pooled_deviations() -> None:
    draw = np.random.default_rng(3)
    target, shadows = draw.standard_normal(5), draw.standard_normal((5, 5))
    rows = ([1, 1, 0, 0, 1], [0, 1, 0, 0, 1], [0, 0, 1, 0, 1], [0, 1, 1, 0, 1], [0, 0, 1, 0, 1])
    included = np.array(rows, bool)
    found = likelihood_ratios(target, shadows, included)
    assert np.isnan(found).tolist() == [False, False, False, True, True]
    logs = []
    for part in (included, ~included):
        means = [shadows[part[:, place], place].mean() for place in range(3)]
        gaps = [shadows[run, place] - means[place] for run in range(5) for place in range(3) if part[run, place]]
        deviation = math.sqrt(sum(gap**2 for gap in gaps) / len(gaps))
        logs.append([float(norm.logpdf(target[place], means[place], deviation)) for place in range(3)])
    assert found[:3] == pytest.approx([one - two for one, two in zip(*logs, strict=True)])


def test_shadows_that_all_agree_still_have_a_ratio() -> None:
    shadows, included = np.array([[1.0], [0.0]]), np.array([[True], [False]])
    near = likelihood_ratios(np.array([1.0]), shadows, included)
    assert near.tolist() == pytest.approx([0.5e12])


def test_confidence_is_finite_at_both_ends() -> None:
    assert confidence_of(np.array([0.0, 1e-9, 1e-6])) == pytest.approx([math.log((1 - 1e-6) / 1e-6)] * 3, rel=1e-6)
    assert confidence_of(np.array([50.0, 1e3])) == pytest.approx([-50.0] * 2)
    assert confidence_of(np.array([math.log(4)])) == pytest.approx([math.log(0.25 / 0.75)])
