"""Per-example losses."""

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
    """Compute the cross-entropy of each example.

    Args:
        objective: "single", "multi", "tokens" or "lm".
        logits: (example, class), or (example, token, class) for "tokens" and "lm".
        targets: Class indices (example,) for "single"; multi-hot (example, class) for "multi"; class indices
            (example, token) for "tokens"; the next token (example, token), already shifted, for "lm".

    Returns:
        (example,). "multi" takes the mean over classes; "tokens" and "lm" take the mean over targets that are not
        IGNORE_INDEX.
    """
    if objective == "single":
        return functional.cross_entropy(logits, targets, reduction="none")
    if objective == "multi":
        return functional.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none").mean(-1)
    per_token = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    ).unflatten(0, targets.shape)  # (example, token), zero where ignored
    # An example without targets has loss 0, not NaN.
    return per_token.sum(1) / (targets != IGNORE_INDEX).sum(1).clamp(min=1)
