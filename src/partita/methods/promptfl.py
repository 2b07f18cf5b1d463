"""PromptFL: clients learn one context for the names of classes together; the frozen pair of towers never travels."""

from __future__ import annotations

from partita.core.method import Method
from partita.core.model import Model
from partita.core.options import Count, Text
from partita.core.plan import Plan, RoundInfo, share
from partita.core.tensors import Names


def promptfl(text_tokens: Count = 16, init_text: Text = "") -> Method:
    """`text_tokens` is the length of the context; `init_text`, such as "a photo of a", is its initial value."""
    return Method(
        "promptfl",
        plan=share_global,
        carry_optimizer=True,
        extend=lambda model, key: model.prompted("prompts", key, text_tokens=text_tokens, init_text=init_text),
    )


def share_global(model: Model, round_info: RoundInfo) -> Plan:
    """What is tagged "global" travels; what is tagged "local" or "fusion" trains with it and stays."""
    shared, own = global_names(model, "global"), global_names(model, "local", "fusion")
    return share(shared | own, down=shared, keep=own)


def global_names(model: Model, *tags: str) -> Names:
    """Unlike model.names, takes a tag that nothing carries."""
    return frozenset(name for name, carried in model.tags.items() if not carried.isdisjoint(tags))
