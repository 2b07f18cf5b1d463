"""Vision-prompt FL: clients learn prompts for the tower of images together; the texts of classes stay as written."""

from __future__ import annotations

from typing import Literal

from partita.core.method import Method
from partita.core.options import Count
from partita.methods.promptfl import share_global


def vpfl(vision_tokens: Count = 8, depth: Count = 1, vision_init: Literal["nothing", "grey"] = "nothing") -> Method:
    """`vision_tokens` prompts enter the first layer, and new ones each of the first `depth` layers.

    With `vision_init` "grey" they start near the patches of a grey image.
    """
    return Method(
        "vpfl",
        plan=share_global,
        carry_optimizer=True,
        extend=lambda model, key: model.prompted(
            "prompts", key, vision_tokens=vision_tokens, depth=depth, vision_init=vision_init
        ),
    )
