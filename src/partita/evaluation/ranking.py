"""Scores that rank examples, for many weightings of the examples at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Area = Callable[[NDArray[Any], NDArray[Any], Floats], Floats]  # of `auroc` and `average_precision`


def auroc(truth: NDArray[Any], scores: NDArray[Any], weights: Floats) -> Floats:
    """Return the area under the ROC curve, (weighting,); NaN without positive or without negative examples.

    Args:
        truth: Whether each example is positive, (example,).
        scores: The score of each, (example,).
        weights: How often each counts, (weighting, example).
    """
    positive, negative = _by_score(truth, scores, weights, np.argsort(scores, kind="stable"))
    below = negative.cumsum(1) - negative
    pairs = positive.sum(1) * negative.sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        area: Floats = (positive * (below + negative / 2)).sum(1) / pairs
    return area


def average_precision(truth: NDArray[Any], scores: NDArray[Any], weights: Floats) -> Floats:
    """Return the mean precision over positive examples, each at the threshold of its own score; NaN without any.

    The arguments are as in `auroc`.
    """
    positive, negative = _by_score(truth, scores, weights, np.argsort(-scores, kind="stable"))
    found, ranked = positive.cumsum(1), (positive + negative).cumsum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        precision = np.where(ranked > 0, found / ranked, 0.0)
        mean: Floats = (positive * precision).sum(1) / found[:, -1]
    return mean


def _by_score(
    truth: NDArray[Any], scores: NDArray[Any], weights: Floats, order: NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """Return the weights of positive and of negative examples, each (weighting, distinct score), in order."""
    ranked, sorted_truth, sorted_weights = scores[order], truth[order].astype(bool), weights[:, order]
    first = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1]))
    positive, negative = (
        np.add.reduceat(np.where(chosen, sorted_weights, 0.0), first, axis=1)
        for chosen in (sorted_truth, ~sorted_truth)
    )
    return positive, negative
