"""SCAFFOLD: control variates replace each client's own drift in its steps by the common direction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from partita.core.method import ClientRule, Context, Method, Server, ServerRule
from partita.core.model import Model
from partita.core.options import NotNegative
from partita.core.tensors import Mean, Names, Slots, Tensors, add, scale, select, subtract, zeros_like
from partita.core.update import Aggregate, Update

PLAIN_SGD = frozenset({"sgd"})


@dataclass(frozen=True)
class ScaffoldClient(ClientRule):
    """Correct gradients by control variates.

    A client's variate is its mean gradient in its last round, computed from the distance it moved (option II).
    """

    slots = frozenset({"control"})
    optimizers = PLAIN_SGD

    def memory(self, anchor: Tensors) -> Slots:
        return {"control": zeros_like(anchor)}

    def gradient(self, grads: Tensors, ctx: Context) -> Tensors:
        # Parameters that stay on the client have no common direction.
        own, common, shared = ctx.memory["control"], ctx.sent["control"], grads.keys() & ctx.plan.up
        return {**grads, **{name: grads[name] - own[name] + common[name] for name in sorted(shared)}}

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        own, common = (select(slots["control"], ctx.plan.up) for slots in (ctx.memory, ctx.sent))
        mean_gradient = {name: (ctx.anchor[name] - params[name]) / (steps[name] * ctx.lr) for name in own}
        new = add(subtract(own, common), mean_gradient)
        return {"control": subtract(new, own)}, {"control": new}


@dataclass(frozen=True)
class ScaffoldServer(ServerRule):
    """Average without weights, so that the common variate stays the mean over all clients, sampled or not.

    Attributes:
        lr: The server learning rate.
    """

    lr: float

    def init(self, model: Model) -> Slots:
        return {"control": zeros_like(model.initial)}

    def send(self, server: Server, client: str, names: Names) -> tuple[Tensors, Slots]:
        return super().send(server, client, names)[0], {"control": server.state["control"]}

    def reduce(self, server: Server, updates: Iterable[Update], population: int) -> Aggregate:
        delta, control, cohort = Mean(), Mean(), 0
        for update in updates:
            cohort += 1
            delta.add(update.delta, 1.0)
            control.add(update.slots.get("control", {}), 1.0)
        return Aggregate(delta.value, {"control": control.over(population)}, cohort)

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        server = super().apply(server, replace(aggregate, delta=scale(aggregate.delta, self.lr)))
        return replace(server, state={"control": add(server.state["control"], aggregate.slots["control"])})


def scaffold(lr: NotNegative = 1.0) -> Method:
    """Build SCAFFOLD with the server learning rate `lr`."""
    return Method("scaffold", client_rules=(ScaffoldClient(),), server_rule=ScaffoldServer(lr))
