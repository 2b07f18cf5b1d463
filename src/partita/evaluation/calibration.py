"""How sure a classifier is, compared with how often it is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

BINS = 15


def bins_of(probabilities: torch.Tensor) -> torch.Tensor:
    """Return the bin of each probability. Bins have equal width and are closed at the upper end."""
    return (probabilities.double() * BINS).ceil().long().sub(1).clamp(0, BINS - 1)


class Calibration:
    """Accuracy and expected calibration error of single-label predictions.

    The expected calibration error (Guo et al. 2017) sorts examples by the largest probability of a class into 15 bins
    of equal width, closed at the upper end. It is the mean over examples of their bin's difference between the mean
    probability and the accuracy.
    """

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []  # (2, example): whether the prediction is right, and its probability

    def add(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a batch of logits (example, class) and class indices (example,)."""
        guesses = logits.argmax(-1)
        top = logits.gather(-1, guesses.unsqueeze(-1)).squeeze(-1)
        sure = (top - logits.logsumexp(-1)).exp()
        self.parts.append(torch.stack((guesses == targets, sure)))

    def scores(self) -> dict[str, float]:
        """Return "accuracy" and "ece". The error is undefined if a probability is not a number."""
        # The values are read once, at the end, so that a GPU does not wait in each batch.
        right, sure = torch.cat(self.parts, 1).double().cpu()
        accuracy = {"accuracy": float(right.sum()) / len(right)}
        if not bool(sure.isfinite().all()):
            return accuracy
        gaps = torch.bincount(bins_of(sure), right - sure, BINS)  # (bin,)
        return {**accuracy, "ece": float(gaps.abs().sum()) / len(right)}


@dataclass(frozen=True, eq=False)
class Reliability:
    """Predictions in bins by their probability.

    Attributes:
        counts: Predictions in each bin, (..., bin).
        sure: The sum of their probabilities, (..., bin).
        right: How many of them are right, (..., bin).
    """

    counts: NDArray[np.float64]
    sure: NDArray[np.float64]
    right: NDArray[np.float64]

    def error(self) -> NDArray[np.float64]:
        """Return the expected calibration error, (...); NaN without predictions."""
        with np.errstate(invalid="ignore", divide="ignore"):
            error: NDArray[np.float64] = np.abs(self.right - self.sure).sum(-1) / self.counts.sum(-1)
        return error

    def table(self) -> list[dict[str, Any]]:
        """Return the bins that hold predictions: their limits, "count", and mean "confidence" and "accuracy"."""
        return [
            {
                "from": place / BINS,
                "to": (place + 1) / BINS,
                "count": int(count),
                "confidence": float(self.sure[place] / count),
                "accuracy": float(self.right[place] / count),
            }
            for place, count in enumerate(self.counts.tolist())
            if count
        ]
