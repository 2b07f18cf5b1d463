"""LoRA with FedAvg: clients train and send low-rank factors and the head; the frozen base weights are never sent."""

from __future__ import annotations

from partita.core.method import Method
from partita.core.model import Model
from partita.core.options import Count, Positive
from partita.core.tensors import Names


def lora(
    rank: Count = 8, alpha: Positive = 16.0, roles: tuple[str, ...] = ("query", "value"), head: bool = True
) -> Method:
    """Build LoRA: FedAvg on the model with `[model.adapter]`. The server averages A and B separately.

    Args:
        rank: Rank of the factors.
        alpha: Scale of the product, which is multiplied by alpha / rank.
        roles: Tags of the linear layers that get factors.
        head: Also train and send the task's head. The output layer of a language model never trains.
    """
    options = {"rank": rank, "alpha": alpha, "roles": roles, "head": head}
    return Method("lora", extend=lambda model, key: model.adapted("lora", key, **options))


def factors(model: Model, head: bool) -> Names:
    """Return the names of the low-rank factors and, with `head`, of the head unless it is tied to the embeddings."""
    own = model.names("lora")
    return own | {name for name, tags in model.tags.items() if head and "head" in tags and "embedding" not in tags}
