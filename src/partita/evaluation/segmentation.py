"""Scores of semantic segmentation, from one confusion matrix over all pixels of all examples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from partita.core.data import IGNORE_INDEX
from partita.evaluation.confusion import confusion_matrix
from partita.evaluation.metrics import LOSS, Metric, Predictions

MEAN_IOU = Metric("mean_iou")


@dataclass(frozen=True)
class Segmentation:
    """Mean IoU and Dice over the classes that occur in masks or predictions, and the accuracy of pixels.

    Pixels without a label do not count. Logits are (example, class, height, width), targets (example, height, width).
    """

    primary: ClassVar[Metric] = MEAN_IOU
    metrics: ClassVar[tuple[Metric, ...]] = (MEAN_IOU, Metric("dice"), Metric("accuracy"), LOSS)
    batch: ClassVar[int] = 16

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]:
        confusion: torch.Tensor | None = None  # (true class, predicted class), in pixels
        loss, count = 0.0, 0
        for batch in batches:
            counts = confusion_matrix(*_labeled(batch), batch.logits.shape[1])
            confusion = counts if confusion is None else confusion + counts
            loss += float(batch.losses.double().sum())
            count += len(batch.losses)
        assert confusion is not None, "there is at least one example"
        return {**_overlaps(confusion.double().cpu()), "loss": loss / count}

    def decisions(self, batch: Predictions) -> tuple[torch.Tensor, torch.Tensor] | None:
        return _labeled(batch)


def _labeled(batch: Predictions) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the predicted and the true classes of the labeled pixels, each (pixel,)."""
    targets = batch.targets.long()
    labeled = targets != IGNORE_INDEX
    return batch.logits.argmax(1)[labeled], targets[labeled]


def _overlaps(confusion: torch.Tensor) -> dict[str, float]:
    """Return the scores; none if no pixel has a label."""
    hits, total = confusion.diagonal(), confusion.sum()
    both = confusion.sum(0) + confusion.sum(1)  # pixels of each class in masks, and in predictions
    occurs = both > 0
    if not total:
        return {}
    return {
        "mean_iou": float((hits / (both - hits))[occurs].mean()),
        "dice": float((2 * hits / both)[occurs].mean()),
        "accuracy": float(hits.sum() / total),
    }
