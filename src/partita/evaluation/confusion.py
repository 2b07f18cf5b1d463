"""Confusion matrices: how often each class is taken for which other one."""

from __future__ import annotations

import torch


def confusion_matrix(predicted: torch.Tensor, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Count the pairs of a true and a predicted class.

    Args:
        predicted: The predicted classes, (example,).
        labels: The true classes, (example,).
        classes: The number of classes.

    Returns:
        Numbers of examples, (true class, predicted class), on the device of `labels`.
    """
    pairs = labels.long() * classes + predicted.long()
    return torch.bincount(pairs, minlength=classes * classes).reshape(classes, classes)
