"""How sure a classifier is, compared with how often it is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

BINS = 15


def bins_of(probabilities: torch.Tensor) -> torch.Tensor:
    """Return the bin of each probability. Bins have equal width and are closed at the upper end."""
    return (probabilities.double() * BINS).ceil().long().sub(1).clamp(0, BINS - 1)


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
        """Return the expected calibration error of Guo et al. (2017), (...); NaN without predictions.

        It is the mean over predictions of their bin's difference between the mean probability and the accuracy.
        """
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


def calibration_error(totals: Mapping[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """Return "ece" from the sums of the block "bins", (weighting, 3 x bin), if there is one."""
    if "bins" not in totals:
        return {}
    return {"ece": Reliability(*np.moveaxis(totals["bins"].reshape(-1, 3, BINS), 1, 0)).error()}
