"""Per-example losses. Each takes the logits and the targets of a batch and returns one loss per example, (example,)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partita.core.data import IGNORE_INDEX
from partita.core.tensors import constants

TINY = 1e-12  # a sum of weights is at least this, so that nothing weighted is 0 and not NaN


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy, for logits (example, class) and targets that are class indices (example,)."""
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def binary_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over classes of the binary cross-entropy. Logits and multi-hot targets are (example, class)."""
    return torch.nn.functional.binary_cross_entropy_with_logits(
        logits, targets.to(logits.dtype), reduction="none"
    ).mean(-1)


def token_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over the tokens of each example.

    Args:
        logits: (example, token, class).
        targets: Class indices (example, token). Tokens with IGNORE_INDEX do not count.
    """
    per_token = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    ).unflatten(0, targets.shape)  # (example, token), zero where ignored
    return mean_over_tokens(per_token, targets)


def mean_over_tokens(per_token: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of each example from those of its tokens (example, token), which are zero where ignored."""
    # An example without targets has loss 0, not NaN.
    return per_token.sum(1) / (targets != IGNORE_INDEX).sum(1).clamp(min=1)


def pixel_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over the labeled pixels of each example.

    Args:
        logits: (example, class, height, width).
        targets: Class indices (example, height, width). Pixels with IGNORE_INDEX do not count.
    """
    return token_cross_entropy(logits.flatten(2).transpose(1, 2), targets.flatten(1).long())


def squared_error(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the squared error as a mean over targets. Predictions and targets are (example, target)."""
    return (predictions - targets).square().mean(-1)


CLASS_LOSSES = (cross_entropy, token_cross_entropy)  # the losses that `class_losses` can take the place of


def class_losses(
    logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0, class_weights: Sequence[float] = ()
) -> torch.Tensor:
    """Return the cross-entropy with smoothed labels and class weights, as torch's `cross_entropy` has them.

    The loss of an example is the mean over its tokens, weighted by the class weights of their targets.

    Args:
        logits: (example, class) or (example, token, class).
        targets: Class indices, (example,) or (example, token). Targets with IGNORE_INDEX do not count.
        label_smoothing: The share of a target that is spread over all classes.
        class_weights: The weight of each class; empty for equal weights.
    """
    log_shares = torch.nn.functional.log_softmax(logits, -1)
    labeled = targets != IGNORE_INDEX
    indices = targets.clamp(min=0)
    all_weights = constants(class_weights, logits) if class_weights else logits.new_ones(logits.shape[-1])
    weights = all_weights[indices] * labeled
    own = -log_shares.gather(-1, indices.unsqueeze(-1)).squeeze(-1) * weights
    spread = -(log_shares * all_weights).mean(-1) * labeled
    losses = (1 - label_smoothing) * own + label_smoothing * spread
    if targets.ndim == 1:
        return losses / weights.clamp(min=TINY)
    return losses.sum(1) / weights.sum(1).clamp(min=TINY)
