"""FedOTP: assign an image's patches to a shared and a local context by unbalanced optimal transport."""

from __future__ import annotations

from typing import Literal

from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.options import Count, Positive, PositiveShare, Text
from partita.methods.promptfl import share_global


def fedotp(
    text_tokens: Count = 16,
    mass: PositiveShare = 0.8,
    smoothing: Positive = 0.1,
    iterations: Count = 100,
    init_text: Text = "",
    context_init: Literal["nothing", "tokens"] = "nothing",
) -> Method:
    """Build FedOTP.

    Args:
        text_tokens: Number of context tokens of each owner.
        mass: Fraction of an image's mass that the texts of a class take in total.
        smoothing: Weight of the entropy.
        iterations: Number of Sinkhorn iterations; always all of them.
        init_text: Initial text of the last tokens of each context; the other tokens are random.
        context_init: Initial values of the context. "tokens": at the scale of the token embeddings.

    Raises:
        MethodError: If `mass`, `smoothing` or `iterations` is out of range.
    """
    if not 0 < mass <= 1 or smoothing <= 0 or iterations < 1:
        raise MethodError(
            f"method.mass is {mass}, method.smoothing {smoothing} and method.iterations {iterations}; "
            "give more than 0 up to 1, more than 0, and 1 or more"
        )
    options = {
        "text_tokens": text_tokens,
        "mass": mass,
        "smoothing": smoothing,
        "iterations": iterations,
        "init_text": init_text,
        "context_init": context_init,
    }
    return Method(
        "fedotp",
        plan=share_global,
        carry_optimizer=True,
        extend=lambda model, key: model.prompted("transport", key, **options),
    )
