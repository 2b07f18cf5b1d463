"""CoOp at each client: every client learns its own context for the class names, and nothing is sent."""

from __future__ import annotations

from typing import Literal

from partita.core.method import Method
from partita.core.options import Count, Text
from partita.methods.promptfl import share_global


def coop(
    text_tokens: Count = 16, init_text: Text = "", context_init: Literal["nothing", "tokens"] = "nothing"
) -> Method:
    """Build local CoOp.

    Args:
        text_tokens: Number of learned context tokens.
        init_text: Initial text of the last context tokens, such as "a photo of a"; the other tokens are random.
        context_init: Initial values of the context. "tokens": at the scale of the token embeddings.
    """
    return Method(
        "coop",
        plan=share_global,
        carry_optimizer=True,
        extend=lambda model, key: model.prompted(
            "prompts",
            key,
            text_tokens=text_tokens,
            owners=("local",),
            init_text=init_text,
            context_init=context_init,
        ),
    )
