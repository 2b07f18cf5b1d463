"""CoOp at each client: everyone learns a context of their own for the names of classes, and nothing travels."""

from __future__ import annotations

from partita.core.method import Method
from partita.core.options import Count, Text
from partita.methods.promptfl import share_global


def coop(text_tokens: Count = 16, init_text: Text = "") -> Method:
    """`text_tokens` is the length of the context; `init_text`, such as "a photo of a", is its initial value."""
    return Method(
        "coop",
        plan=share_global,
        carry_optimizer=True,
        extend=lambda model, key: model.prompted(
            "prompts", key, text_tokens=text_tokens, owners=("local",), init_text=init_text
        ),
    )
