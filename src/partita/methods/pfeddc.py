"""pFedDC: shared and local prompts in both encoders, fused by cross-attention; only the shared prompts are sent."""

from __future__ import annotations

from typing import Literal

from partita.core.method import Method
from partita.core.method_error import MethodError
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
    vision_init: Literal["nothing", "gray", "tokens"] = "gray",
    context_init: Literal["nothing", "tokens"] = "nothing",
) -> Method:
    """Build pFedDC.

    Args:
        text_tokens: Number of text prompts of each owner. 0: the text encoder has none.
        vision_tokens: Number of vision prompts of each owner. 0: the image encoder has none.
        depth: Number of image encoder layers that get vision prompts.
        fusion: Which prompts are the queries of the cross-attention.
        output: Initial scale of the cross-attention's output.
        local: Use local prompts. False: only shared prompts.
        init_text: Initial text of the last tokens of each context; the other tokens are random.
        vision_init: Initial value of the vision prompts. "gray": near the patches of a gray image. "tokens": at their
            scale.
        context_init: Initial values of the context. "tokens": at the scale of the token embeddings.

    Raises:
        MethodError: If there are neither text nor vision prompts.
    """
    if not text_tokens and not vision_tokens:
        raise MethodError("pfeddc has no prompts with text_tokens = 0 and vision_tokens = 0; use zero-shot")
    sizes = {"text_tokens": text_tokens, "vision_tokens": vision_tokens, "depth": depth}
    options = {**sizes, "fusion": fusion, "output": output, "init_text": init_text, "vision_init": vision_init}
    options["context_init"] = context_init
    owners = ("global", "local") if local else ("global",)
    return Method(
        "pfeddc",
        plan=share_global,
        carry_optimizer=True,
        extend=lambda model, key: model.prompted("prompts", key, owners=owners, **options),
    )
