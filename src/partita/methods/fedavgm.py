"""FedAvgM: the server applies the mean update with momentum."""

from __future__ import annotations

from dataclasses import dataclass, replace

from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model
from partita.core.options import NotNegative, PartialShare
from partita.core.server_rule import Server, ServerRule
from partita.core.tensors import Slots, scale, zeros_like
from partita.core.update import Aggregate


@dataclass(frozen=True)
class FedAvgMServer(ServerRule):
    """Server step w + lr · velocity, where velocity = beta · velocity + mean update."""

    lr: float
    beta: float

    def init(self, model: Model) -> Slots:
        return {"velocity": zeros_like(model.initial)}

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        old = server.state["velocity"]
        new = {name: self.beta * old[name] + value for name, value in aggregate.delta.items()}
        server = super().apply(server, replace(aggregate, delta=scale(new, self.lr)))
        return replace(server, state={"velocity": {**old, **new}})


def fedavgm(lr: NotNegative = 1.0, beta: PartialShare = 0.9) -> Method:
    """Build FedAvgM with the server learning rate `lr` and the momentum `beta`.

    Raises:
        MethodError: If `beta` is not in [0, 1).
    """
    if not 0 <= beta < 1:
        raise MethodError(f"method.beta is {beta}; momentum must be at least 0 and below 1")
    return Method("fedavgm", server_rule=FedAvgMServer(lr, beta))
