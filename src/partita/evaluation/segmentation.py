"""Scores of semantic segmentation, from one confusion matrix over all pixels of all examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from partita.core.data import IGNORE_INDEX
from partita.evaluation.bootstrap import Floats
from partita.evaluation.by_example import ByExample, Kept, mean_of, means
from partita.evaluation.calibration import BINS, bins_of, calibration_error
from partita.evaluation.evaluator import Predictions
from partita.evaluation.metrics import LOSS
from partita.evaluation.outcomes import Columns, Confusion, Totals, by_class, class_mean, ratio
from partita.record.metric import ACCURACY, Metric

MEAN_IOU = Metric("mean_iou")


@dataclass(frozen=True)
class Segmentation(ByExample):
    """Mean IoU and Dice over the classes that occur in masks or predictions, and the accuracy of pixels.

    Pixels without a label do not count. Logits are (example, class, height, width), targets (example, height, width).
    """

    metrics: ClassVar[tuple[Metric, ...]] = (MEAN_IOU, Metric("dice"), ACCURACY, LOSS)
    batch: ClassVar[int] = 16

    def keep(self, batch: Predictions, first: int, details: bool) -> Kept:
        guesses, targets = _labeled(batch)
        images, size = batch.logits.shape[:2]
        labeled = batch.targets != IGNORE_INDEX
        image = labeled.nonzero()[:, 0]  # (pixel,)
        pairs = torch.bincount((image * size + targets) * size + guesses, minlength=images * size**2)
        kept = {"pixels": pairs.view(images, size**2), "losses": batch.losses}
        if not details:
            return kept
        sure = (batch.logits.amax(1) - batch.logits.logsumexp(1)).exp()[labeled]
        right, places = (guesses == targets).double(), (image * BINS + bins_of(sure)).cpu()
        # On the CPU: a weighted count has no deterministic CUDA kernel.
        sums = [
            torch.bincount(places, each.cpu(), images * BINS) for each in (torch.ones_like(right), sure.double(), right)
        ]
        return {**kept, "bins": torch.stack(sums).view(3, images, BINS).movedim(0, 1).reshape(images, 3 * BINS)}

    def columns(self, kept: Kept) -> Columns:
        columns = {"loss": mean_of(kept["losses"]), "pixels": kept["pixels"].double().numpy()}
        if "bins" in kept:
            from scipy import sparse

            # All examples are kept, and most pairs of classes are in few of them.
            return {**columns, "pixels": sparse.csr_array(columns["pixels"]), "bins": kept["bins"].numpy()}
        return columns

    def formula(self, totals: Totals, classes: Sequence[str]) -> dict[str, Floats]:
        size = math.isqrt(totals["pixels"].shape[1])
        matrix = totals["pixels"].reshape(-1, size, size)  # (weighting, true class, predicted class)
        hits, both = matrix.diagonal(axis1=1, axis2=2), matrix.sum(1) + matrix.sum(2)  # (weighting, class)
        overlap, dice = ratio(hits, both - hits), ratio(2 * hits, both)
        return {
            **means(totals, "loss"),
            "mean_iou": class_mean(overlap),
            "dice": class_mean(dice),
            "accuracy": ratio(hits.sum(1), matrix.sum((1, 2))),
            **by_class("pixels", classes, matrix.sum(2)),
            **by_class("iou", classes, overlap),
            **by_class("dice", classes, dice),
            **calibration_error(totals),
        }

    def confusion(self, kept: Kept, classes: tuple[str, ...]) -> Confusion:
        counts = kept["pixels"].sum(0).view(len(classes), len(classes))
        return Confusion(classes, counts.numpy(), "pixels")

    def decisions(self, batch: Predictions) -> tuple[torch.Tensor, torch.Tensor] | None:
        return _labeled(batch)


def _labeled(batch: Predictions) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the predicted and the true classes of the labeled pixels, each (pixel,)."""
    targets = batch.targets.long()
    labeled = targets != IGNORE_INDEX
    return batch.logits.argmax(1)[labeled], targets[labeled]
