"""pFedDC: shared and own prompts in both towers, fused by cross-attention; only the shared prompts travel."""

from __future__ import annotations

from typing import Literal

from partita.core.method import Method, MethodError
from partita.core.options import Count, NotNegative, Text, Whole
from partita.methods.promptfl import share_global


def pfeddc(
    text_tokens: Whole = 16,
    vision_tokens: Whole = 8,
    depth: Count = 1,
    fusion: Literal["local_queries", "global_queries", "both", "mean", "none"] = "local_queries",
    output: NotNegative = 1.0,
    local: bool = True,
    init_text: Text = "",
    vision_init: Literal["nothing", "grey"] = "nothing",
) -> Method:
    """So many prompts of text and of vision, of either owner; with 0, that tower has none.

    `fusion` says who asks whom in the cross-attention, and `output` how much it adds at first; without `local`, only
    shared prompts are left. `init_text` and `vision_init` are the initial values of text and vision prompts.
    """
    if not text_tokens and not vision_tokens:
        raise MethodError("pfeddc has no prompts with text_tokens = 0 and vision_tokens = 0; use zero-shot")
    sizes = {"text_tokens": text_tokens, "vision_tokens": vision_tokens, "depth": depth}
    options = {**sizes, "fusion": fusion, "output": output, "init_text": init_text, "vision_init": vision_init}
    owners = ("global", "local") if local else ("global",)
    return Method(
        "pfeddc",
        plan=share_global,
        carry_optimizer=True,
        extend=lambda model, key: model.prompted("prompts", key, owners=owners, **options),
    )
