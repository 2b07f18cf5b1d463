"""What a guess about membership is worth: error rates, likelihood ratios, and what right guesses prove of epsilon."""

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
POINTS = 200  # of a curve that is kept for a figure


@dataclass(frozen=True)
class Roc:
    """How members stand out by their scores: who is above a threshold is called a member."""

    false: Array  # positive rates, rising, from 0 to 1
    true: Array
    members: int
    outsiders: int

    @property
    def auc(self) -> float:
        return float(np.sum(np.diff(self.false) * (self.true[1:] + self.true[:-1]) / 2))

    def true_at(self, false: float) -> float:
        """The best rate of members found with at most so many false alarms."""
        return float(self.true[self.false <= false].max())

    def about(self) -> dict[str, Any]:
        kept = np.unique(np.linspace(0, len(self.false) - 1, POINTS).astype(int))
        return {
            "auc": round(self.auc, 4),
            "true_at_1%": round(self.true_at(0.01), 4),
            "members": self.members,
            "outsiders": self.outsiders,
            "false": [round(float(self.false[place]), 4) for place in kept],
            "true": [round(float(self.true[place]), 4) for place in kept],
        }


def roc(members: Sequence[float] | Array, outsiders: Sequence[float] | Array) -> Roc:
    """Scores that tie are passed together, so that a constant score is no better than chance."""
    inside, outside = np.asarray(members, float), np.asarray(outsiders, float)
    if not len(inside) or not len(outside):
        raise ValueError(f"an attack needs members and outsiders; there are {len(inside)} and {len(outside)}")
    steps = np.unique(np.concatenate([inside, outside]))[::-1]

    def above(part: Array) -> Array:  # the share at or above each threshold
        counts = np.searchsorted(np.sort(-part), -steps, side="right")
        return np.concatenate([[0.0], counts / len(part)])

    return Roc(above(outside), above(inside), len(inside), len(outside))


@dataclass(frozen=True)
class Bound:
    """With the confidence given, no mechanism of a smaller epsilon lets so many guesses come true."""

    epsilon: float
    guesses: int
    right: int
    canaries: int
    delta: float
    confidence: float

    def about(self) -> dict[str, Any]:
        return asdict(self)


def bound_epsilon(scores: Array, included: NDArray[np.bool_], delta: float, confidence: float = 0.95) -> Bound:
    """From one training run whose canaries were each put in by the toss of a coin (Steinke, Nasr and Jagielski 2023).

    The highest scores are guessed to be in and the lowest out. How many to guess is tried in a few ways, fixed
    beforehand, each at its share of the risk of being wrong.
    """
    count = len(scores)
    order = np.argsort(scores, kind="stable")
    tries = sorted({max(2, 2 * (count * part // 200)) for part in (10, 25, 50, 100)})
    best: Bound | None = None
    for guesses in tries:
        out, into = order[: guesses // 2], order[count - guesses // 2 :]
        right = int((~included[out]).sum() + included[into].sum())
        found = _least_epsilon(count, guesses, right, delta, (1 - confidence) / len(tries))
        if best is None or found > best.epsilon:
            best = Bound(found, guesses, right, count, delta, confidence)
    assert best is not None
    return best


def best_guesses(
    scores: Array, included: NDArray[np.bool_], delta: float, confidence: float = 0.95
) -> tuple[Array, Bound]:
    """The row of scores (attack, canary) that proves most, and its bound, each at its share of the risk."""
    share = 1 - (1 - confidence) / len(scores)
    bounds = [bound_epsilon(row, included, delta, share) for row in scores]
    # Where none proves anything, the first row is the attacker who believes the claim.
    best = max(range(len(scores)), key=lambda row: (bounds[row].epsilon, -row))
    return scores[best], replace(bounds[best], confidence=confidence)


def chance_of(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """At most so likely are so many right guesses under (epsilon, delta)."""
    accuracy = 1 / (1 + math.exp(-epsilon))
    likely = float(binom.sf(right - 1, guesses, accuracy))
    if not delta or not right:
        return min(1.0, likely)
    # Delta may buy i right guesses at the price of falling short of them otherwise: the worst i counts.
    steps = np.arange(1, right + 1)
    gathered = np.cumsum(binom.pmf(right - steps, guesses, accuracy))
    return min(1.0, likely + 2 * canaries * delta * float(np.max(gathered / steps)))


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
    """LiRA: of each example's confidence in the target, by how it fell in shadow runs with and without the example.

    target (example,), shadows and included (run, example). Both normal distributions share a spread over all examples,
    since few shadows tell little of each one's own. An example that was always in, or never, has no ratio: NaN.
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
    """log(p / (1 - p)) of the right answer's probability: nearly normal over runs, which the loss is not."""
    kept = np.clip(losses, 1e-6, 50.0)
    return np.asarray(-kept - np.log(-np.expm1(-kept)))
