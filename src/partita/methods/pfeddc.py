"""pFedDC: shared and own prompts in both towers, fused by cross-attention; only the shared prompts travel."""

from __future__ import annotations

from typing import Literal

from partita.core.method import Method, MethodError
from partita.core.options import Count, NotNegative, Text, Whole
from partita.methods.promptfl import share_global


def pfeddc(
    text: Whole = 16,
    vision: Whole = 8,
    depth: Count = 1,
    fusion: Literal["local_queries", "global_queries", "both", "mean", "none"] = "local_queries",
    output: NotNegative = 1.0,
    local: bool = True,
    phrase: Text = "",
    view: Literal["nothing", "grey"] = "nothing",
) -> Method:
    """So many prompts of text and of vision, of either owner; with 0, that tower has none.

    `fusion` says who asks whom in the cross-attention, and `output` how much it adds at first; without `local`, only
    shared prompts are left. `phrase` and `view` are what prompts of text say, and those of vision show, at first.
    """
    if not text and not vision:
        raise MethodError("pfeddc has no prompts with text = 0 and vision = 0; use zero-shot")
    sizes = {"text": text, "vision": vision, "depth": depth}
    options = {**sizes, "fusion": fusion, "output": output, "phrase": phrase, "view": view}
    owners = ("global", "local") if local else ("global",)
    return Method(
        "pfeddc",
        plan=share_global,
        carry_optimizer=True,
        extend=lambda model, key: model.prompted("prompts", key, owners=owners, **options),
    )
