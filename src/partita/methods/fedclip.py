"""FedCLIP: clients jointly learn an attention adapter on the image features; the encoders stay frozen."""

from __future__ import annotations

from partita.core.method import Method
from partita.methods.promptfl import share_global


def fedclip() -> Method:
    """Build FedCLIP."""
    return Method(
        "fedclip",
        plan=share_global,
        carry_optimizer=True,
        extend=lambda model, key: model.prompted("adapter", key),
    )
