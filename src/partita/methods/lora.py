"""LoRA under FedAvg: clients train and send low-rank factors and the head, and the base weights never travel."""

from __future__ import annotations

from partita.core.method import Method
from partita.core.model import Model
from partita.core.options import Count, Positive
from partita.core.plan import Plan, RoundInfo, share
from partita.core.tensors import Names


def lora(
    rank: Count = 8, alpha: Positive = 16.0, roles: tuple[str, ...] = ("query", "value"), head: bool = True
) -> Method:
    """Factors beside the linear layers of the roles, scaled by alpha / rank; A and B are averaged each by itself.

    `head` has the task's head train whole beside them; one that is tied to the embeddings never does.
    """

    def plan(model: Model, round_info: RoundInfo) -> Plan:
        train = factors(model, head)
        return share(train, down=train)

    return Method("lora", plan=plan, extend=lambda model, key: model.low_rank(rank, alpha, roles, key))


def factors(model: Model, head: bool) -> Names:
    own = model.names("lora")
    return own | {name for name, tags in model.tags.items() if head and "head" in tags and "embedding" not in tags}
