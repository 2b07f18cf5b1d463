"""Vision-prompt FL: clients learn prompts for the tower of images together; the texts of classes stay as written."""

from __future__ import annotations

from typing import Literal

from partita.core.method import Method
from partita.core.options import Count
from partita.methods.promptfl import share_global


def vpfl(vision: Count = 8, depth: Count = 1, view: Literal["nothing", "grey"] = "nothing") -> Method:
    """`vision` prompts enter the first layer, and new ones each of the first `depth` layers.

    With `view` "grey" they start near the patches of a grey image.
    """
    return Method(
        "vpfl",
        plan=share_global,
        carry_optimizer=True,
        extend=lambda model, key: model.prompted("prompts", key, vision=vision, depth=depth, view=view),
    )
