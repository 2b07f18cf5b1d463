"""CoOp at each client: everyone learns a context of their own for the names of classes, and nothing travels."""

from __future__ import annotations

from partita.core.method import Method
from partita.core.options import Count, Text
from partita.methods.promptfl import share_global


def coop(text: Count = 16, phrase: Text = "") -> Method:
    """`text` is the context's length in tokens; a phrase, such as "a photo of a", is what it says at first."""
    return Method(
        "coop",
        plan=share_global,
        carry_optimizer=True,
        extend=lambda model, key: model.prompted("prompts", key, text=text, owners=("local",), phrase=phrase),
    )
