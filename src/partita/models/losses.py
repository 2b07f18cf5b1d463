"""What a model is trained for: one loss for each example."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional

from partita.core.data import IGNORE_INDEX
from partita.models import Kind

Objective = Literal["single", "multi", "tokens", "lm"]
KINDS: dict[Objective, tuple[Kind, ...]] = {
    "single": ("image", "text"),
    "multi": ("image", "text"),
    "tokens": ("tokens",),
    "lm": ("lm",),
}


def losses_for(objective: Objective, logits: Tensor, targets: Tensor) -> Tensor:
    """(example,): the cross-entropy of each, its mean over classes or over the targets that count.

    For "single", targets are classes (example,); for "multi", zeros and ones (example, class); for "tokens" and "lm",
    what is to be told at each token (example, token), which for "lm" is the next token: they are already shifted.
    """
    if objective == "single":
        return functional.cross_entropy(logits, targets, reduction="none")
    if objective == "multi":
        return functional.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none").mean(-1)
    each = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    ).unflatten(0, targets.shape)  # (example, token), zero where ignored
    # An example without any target that counts has no loss, and not NaN.
    return each.sum(1) / (targets != IGNORE_INDEX).sum(1).clamp(min=1)
