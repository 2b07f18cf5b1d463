"""FedOTP: a shared and an own context share out an image's patches by unbalanced optimal transport."""

from __future__ import annotations

from partita.core.method import Method, MethodError
from partita.core.options import Count, Positive, PositiveShare, Text
from partita.methods.promptfl import share_global


def fedotp(
    text_tokens: Count = 16,
    mass: PositiveShare = 0.8,
    smoothing: Positive = 0.1,
    iterations: Count = 100,
    init_text: Text = "",
) -> Method:
    """`mass` is how much of an image the texts of a class take in all; `smoothing` the weight of the entropy."""
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
    }
    return Method(
        "fedotp",
        plan=share_global,
        carry_optimizer=True,
        extend=lambda model, key: model.prompted("transport", key, **options),
    )
