"""PromptFL: clients jointly learn one context for the class names; the frozen dual encoder is never sent."""

from __future__ import annotations

from typing import Literal

from partita.core.method import Method
from partita.core.model import Model
from partita.core.options import Count, Text
from partita.core.plan import Plan, RoundInfo, share
from partita.core.tensors import Names


def promptfl(
    text_tokens: Count = 16, init_text: Text = "", context_init: Literal["nothing", "tokens"] = "nothing"
) -> Method:
    """Build PromptFL.

    Args:
        text_tokens: Number of learned context tokens.
        init_text: Initial text of the last context tokens, such as "a photo of a"; the other tokens are random.
        context_init: Initial values of the context. "tokens": at the scale of the token embeddings.
    """
    return Method(
        "promptfl",
        plan=share_global,
        carry_optimizer=True,
        extend=lambda model, key: model.prompted(
            "prompts", key, text_tokens=text_tokens, init_text=init_text, context_init=context_init
        ),
    )


def share_global(model: Model, round_info: RoundInfo) -> Plan:
    """Plan that sends the parameters tagged "global" and keeps those tagged "local" or "fusion". All of them train."""
    shared, own = global_names(model, "global"), global_names(model, "local", "fusion")
    return share(shared | own, down=shared, keep=own)


def global_names(model: Model, *tags: str) -> Names:
    """Return the names with any of the tags. Unlike `model.names`, accept a tag that no parameter has."""
    return frozenset(name for name, carried in model.tags.items() if not carried.isdisjoint(tags))
