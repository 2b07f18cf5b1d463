"""Vision-prompt FL: clients jointly learn prompts for the image encoder; the class texts stay fixed."""

from __future__ import annotations

from typing import Literal

from partita.core.method import Method
from partita.core.options import Count
from partita.methods.promptfl import share_global


def vpfl(
    vision_tokens: Count = 8, depth: Count = 1, vision_init: Literal["nothing", "gray", "tokens"] = "gray"
) -> Method:
    """Build vision-prompt FL.

    Args:
        vision_tokens: Number of prompts per layer.
        depth: Number of layers, from the first, that get their own prompts.
        vision_init: Initial value of the prompts. "gray": near the patches of a gray image. "tokens": at their scale.
    """
    return Method(
        "vpfl",
        plan=share_global,
        carry_optimizer=True,
        extend=lambda model, key: model.prompted(
            "prompts", key, vision_tokens=vision_tokens, depth=depth, vision_init=vision_init
        ),
    )
