"""LoRA under FedAvg: clients train and send low-rank factors and the head, and the base weights never travel."""

from __future__ import annotations

from partita.core.method import Method
from partita.core.model import Model
from partita.core.plan import Plan, Turn, share


def lora(rank: int = 8, alpha: float = 16.0, roles: tuple[str, ...] = ("query", "value")) -> Method:
    """Factors beside the linear layers of the roles, scaled by alpha / rank; A and B are averaged each by itself."""

    def plan(model: Model, turn: Turn) -> Plan:
        train = model.names("lora", "head")
        return share(train, down=train)

    return Method("lora", plan=plan, extend=lambda model, key: model.low_rank(rank, alpha, roles, key))
