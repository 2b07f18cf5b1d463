"""Membership inference: error rates, likelihood ratios, and the lower bound on epsilon that correct guesses prove."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binom, norm

Array = NDArray[np.float64]
POINTS = 200  # points of a curve kept for a figure


@dataclass(frozen=True)
class Roc:
    """ROC curve of an attack that calls every example above a score threshold a member."""

    false: Array  # false positive rates, ascending from 0 to 1
    true: Array  # true positive rates
    members: int  # number of members
    non_members: int  # number of non-members

    @property
    def auc(self) -> float:
        """The area under the curve; 0.5 is chance."""
        return float(np.sum(np.diff(self.false) * (self.true[1:] + self.true[:-1]) / 2))

    def true_at(self, false: float) -> float:
        """Return the best true positive rate at a false positive rate of at most `false`."""
        return float(self.true[self.false <= false].max())

    def about(self) -> dict[str, Any]:
        """Return the curve and its summary as a dict for JSON, with at most `POINTS` points."""
        kept = np.unique(np.linspace(0, len(self.false) - 1, POINTS).astype(int))
        return {
            "auc": round(self.auc, 4),
            "true_at_1%": round(self.true_at(0.01), 4),
            "members": self.members,
            "outsiders": self.non_members,
            "false": [round(float(self.false[place]), 4) for place in kept],
            "true": [round(float(self.true[place]), 4) for place in kept],
        }


def roc(members: Sequence[float] | Array, non_members: Sequence[float] | Array) -> Roc:
    """Compute the ROC curve. Tied scores pass the threshold together, so a constant score equals chance.

    Args:
        members: Scores of the members, (member,).
        non_members: Scores of the non-members, (non-member,).

    Raises:
        ValueError: If there are no members or no non-members.
    """
    inside, outside = np.asarray(members, float), np.asarray(non_members, float)
    if not len(inside) or not len(outside):
        raise ValueError(f"an attack needs members and non-members; there are {len(inside)} and {len(outside)}")
    steps = np.unique(np.concatenate([inside, outside]))[::-1]

    def above(part: Array) -> Array:  # fraction at or above each threshold
        counts = np.searchsorted(np.sort(-part), -steps, side="right")
        return np.concatenate([[0.0], counts / len(part)])

    return Roc(above(outside), above(inside), len(inside), len(outside))


@dataclass(frozen=True)
class Bound:
    """Lower bound on epsilon: with the given confidence, a smaller epsilon cannot explain this many correct guesses.

    Attributes:
        epsilon: The bound.
        guesses: Number of canaries that the attack guessed.
        right: Number of correct guesses.
        canaries: Number of all canaries.
        delta: Delta of the guarantee.
        confidence: Confidence of the bound.
    """

    epsilon: float
    guesses: int
    right: int
    canaries: int
    delta: float
    confidence: float

    def about(self) -> dict[str, Any]:
        """Return the fields as a dict for JSON."""
        return asdict(self)


def bound_epsilon(scores: Array, included: NDArray[np.bool_], delta: float, confidence: float = 0.95) -> Bound:
    """Bound epsilon from one training run with randomly included canaries (Steinke, Nasr and Jagielski 2023).

    The attack guesses that the highest scores are included and the lowest are not. A few numbers of guesses, fixed in
    advance, are tried, and the error probability is split equally among them.

    Args:
        scores: Score of each canary, (canary,).
        included: Whether each canary was included, (canary,).
        delta: Delta of the guarantee.
        confidence: Confidence of the bound.
    """
    count = len(scores)
    order = np.argsort(scores, kind="stable")
    tries = sorted({max(2, 2 * (count * part // 200)) for part in (10, 25, 50, 100)})
    best: Bound | None = None
    for guesses in tries:
        out, into = order[: guesses // 2], order[count - guesses // 2 :]
        right = int((~included[out]).sum() + included[into].sum())
        epsilon = _least_epsilon(count, guesses, right, delta, (1 - confidence) / len(tries))
        if best is None or epsilon > best.epsilon:
            best = Bound(epsilon, guesses, right, count, delta, confidence)
    assert best is not None
    return best


def best_guesses(
    scores: Array, included: NDArray[np.bool_], delta: float, confidence: float = 0.95
) -> tuple[Array, Bound]:
    """Return the row of `scores` (attack, canary) with the largest bound, and the bound.

    The error probability is split equally among the attacks.

    Args:
        scores: Scores, (attack, canary).
        included: Whether each canary was included, (canary,).
        delta: Delta of the guarantee.
        confidence: Confidence of the bound.
    """
    share = 1 - (1 - confidence) / len(scores)
    bounds = [bound_epsilon(row, included, delta, share) for row in scores]
    # If all bounds are zero, take the first row: the attacker who trusts the claimed noise.
    best = max(range(len(scores)), key=lambda row: (bounds[row].epsilon, -row))
    return scores[best], replace(bounds[best], confidence=confidence)


def chance_of(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Bound the probability of at least `right` correct guesses under (epsilon, delta).

    Args:
        canaries: Number of all canaries.
        guesses: Number of canaries that were guessed.
        right: Number of correct guesses.
        epsilon: Epsilon of the guarantee.
        delta: Delta of the guarantee.
    """
    if not right:
        return 1.0
    accuracy = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, accuracy))
    # Delta can add i correct guesses with a probability that shrinks with i. Take the worst i.
    steps = np.arange(1, right + 1)
    cumulative = np.cumsum(binom.pmf(right - steps, guesses, accuracy))
    return min(1.0, tail + 2 * canaries * delta * float(np.max(cumulative / steps)))


def _least_epsilon(canaries: int, guesses: int, right: int, delta: float, risk: float) -> float:
    def excess(epsilon: float) -> float:
        return chance_of(canaries, guesses, right, epsilon, delta) - risk

    if excess(0.0) >= 0:
        return 0.0
    high = 1.0
    while excess(high) < 0:
        high *= 2
    return float(brentq(excess, 0.0, high, xtol=1e-6))


def likelihood_ratios(target: Array, shadows: Array, included: NDArray[np.bool_]) -> Array:
    """Compute LiRA's log likelihood ratios of the target's confidences, with and without each example.

    Both normal distributions use a standard deviation pooled over all examples, because a few shadow runs cannot
    estimate one per example.

    Args:
        target: Confidences in the target run, (example,).
        shadows: Confidences in the shadow runs, (run, example).
        included: Whether each shadow run trained on the example, (run, example).

    Returns:
        Log ratios, (example,). NaN for an example that was in all shadow runs or in none.
    """
    logs = []
    known = np.asarray(included.any(0)) & ~np.asarray(included.all(0))
    for part in (included, ~included):
        counts = np.maximum(1, part.sum(0))
        means = np.where(known, (shadows * part).sum(0) / counts, np.nan)  # (example,)
        gaps = (shadows - means)[part & known]
        logs.append(norm.logpdf(target, means, max(1e-6, float(np.sqrt(np.mean(gaps**2))))))
    return np.asarray(logs[0] - logs[1])


def confidence_of(losses: Array) -> Array:
    """Convert losses to log(p / (1 - p)) of the correct answer. Unlike the loss, it is nearly normal over runs."""
    kept = np.clip(losses, 1e-6, 50.0)
    return np.asarray(-kept - np.log(-np.expm1(-kept)))
