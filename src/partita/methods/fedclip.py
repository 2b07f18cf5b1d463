"""FedCLIP: clients learn an attention adapter on an image's feature together; the towers stay as they are."""

from __future__ import annotations

from partita.core.method import Method
from partita.methods.promptfl import share_global


def fedclip() -> Method:
    return Method(
        "fedclip",
        plan=share_global,
        carry_optimizer=True,
        extend=lambda model, key: model.prompted("adapter", key),
    )
