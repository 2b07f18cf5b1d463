"""Per-example losses. Each takes the logits and the targets of a batch and returns one loss per example, (example,)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from partita.core.data import IGNORE_INDEX


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy, for logits (example, class) and targets that are class indices (example,)."""
    return functional.cross_entropy(logits, targets, reduction="none")


def binary_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over classes of the binary cross-entropy. Logits and multi-hot targets are (example, class)."""
    return functional.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none").mean(-1)


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over the tokens of each example.

    Args:
        logits: (example, token, class).
        targets: Class indices (example, token). Tokens with IGNORE_INDEX do not count.
    """
    per_token = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    ).unflatten(0, targets.shape)  # (example, token), zero where ignored
    # An example without targets has loss 0, not NaN.
    return per_token.sum(1) / (targets != IGNORE_INDEX).sum(1).clamp(min=1)


def pixel_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over the labeled pixels of each example.

    Args:
        logits: (example, class, height, width).
        targets: Class indices (example, height, width). Pixels with IGNORE_INDEX do not count.
    """
    return token_cross_entropy(logits.flatten(2).transpose(1, 2), targets.flatten(1).long())


def squared_error(predictions: Tensor, targets: Tensor) -> Tensor:
    """Return the squared error as a mean over targets. Predictions and targets are (example, target)."""
    return (predictions - targets).square().mean(-1)
