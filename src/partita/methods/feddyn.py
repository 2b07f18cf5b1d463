"""FedDyn: linear and proximal terms in each client's loss, so that clients can only agree at the global optimum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partita.core.data import Batch
from partita.core.method import ClientRule, Context, Method, MethodError, Server, ServerRule
from partita.core.model import Model, Output
from partita.core.options import Positive
from partita.core.tensors import Mean, Slots, Tensors, add, scale, subtract, zeros_like
from partita.core.update import Aggregate, Update
from partita.methods.fedprox import FedProxClient


@dataclass(frozen=True)
class FedDynClient(ClientRule):
    """Linear term -<tilt, w>.

    The tilt accumulates the pull of the proximal term. At a fixed point it equals the client's own gradient.

    Attributes:
        alpha: The regularization weight.
    """

    alpha: float
    slots = frozenset({"tilt"})

    def memory(self, anchor: Tensors) -> Slots:
        return {"tilt": zeros_like(anchor)}

    def penalty(self, out: Output, params: Tensors, batch: Batch, ctx: Context) -> Tensor | None:
        shared = sorted(ctx.plan.up)
        inner = [(ctx.memory["tilt"][name] * params[name]).sum() for name in shared]
        return -torch.stack(inner).sum() if inner else None

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        moved = {name: params[name] - ctx.anchor[name] for name in sorted(ctx.plan.up)}
        tilt = {name: ctx.memory["tilt"][name] for name in moved}
        return {}, {"tilt": subtract(tilt, scale(moved, self.alpha))}


@dataclass(frozen=True)
class FedDynServer(ServerRule):
    """Unweighted mean over the clients that answered, minus the mean tilt of all clients divided by alpha."""

    alpha: float

    def init(self, model: Model) -> Slots:
        return {"tilt": zeros_like(model.initial)}

    def reduce(self, server: Server, updates: Iterable[Update], population: int) -> Aggregate:
        delta, cohort = Mean(), 0
        for update in updates:
            cohort += 1
            delta.add(update.delta, 1.0)
        return Aggregate(delta.value, {"moved": delta.over(population)}, cohort)

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        tilt = add(server.state["tilt"], scale(aggregate.slots["moved"], -self.alpha))
        delta = {name: value - tilt[name] / self.alpha for name, value in aggregate.delta.items()}
        return replace(super().apply(server, replace(aggregate, delta=delta)), state={"tilt": tilt})


def feddyn(alpha: Positive = 0.01) -> Method:
    """Build FedDyn with the regularization weight `alpha`.

    Raises:
        MethodError: If `alpha` is not above 0.
    """
    if alpha <= 0:
        raise MethodError(f"method.alpha is {alpha}; it must be above 0 because the server divides by it")
    return Method("feddyn", client_rules=(FedProxClient(alpha), FedDynClient(alpha)), server_rule=FedDynServer(alpha))
