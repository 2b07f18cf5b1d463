"""SCAFFOLD: control variates replace each client's own drift in its steps by the common direction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from partita.core.client_rule import ClientRule, Context
from partita.core.method import Method
from partita.core.model import Model
from partita.core.options import NotNegative
from partita.core.server_rule import Server, ServerRule
from partita.core.tensors import Mean, Names, Slots, Tensors, add, scale, select, subtract, zeros_like
from partita.core.update import Aggregate, Update
from partita.methods.client_weights import PopulationWeights, Weigh, remembered, rescaled

PLAIN_SGD = frozenset({"sgd"})


@dataclass(frozen=True)
class ScaffoldClient(ClientRule):
    """Correct gradients by control variates.

    A client's variate is its mean gradient in its last round, computed from the distance it moved (option II).
    """

    slots = frozenset({"control"})
    optimizers = PLAIN_SGD
    allows_clip = False

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
    """Average updates, and keep the common variate equal to the mean over all clients, sampled or not.

    With the weights p_i of the clients, c = sum_i p_i c_i. A round rests where no client moves: grad f_i(x) - c_i + c
    is 0 for every client, and with it c_i = grad f_i(x) after the client's round. Then c = 0, that is
    sum_i p_i grad f_i(x) = 0: x is the optimum of sum_i p_i f_i, whoever takes part.

    Attributes:
        lr: The server learning rate.
        weigh: How clients count: p_i = 1 / N with "clients", n_i / sum_j n_j with "examples".
    """

    lr: float
    weigh: Weigh = "clients"

    @property
    def needs_sizes(self) -> bool:
        return self.weigh == "examples"

    def init(self, model: Model) -> Slots:
        return {"control": zeros_like(model.initial)}

    def send(self, server: Server, client: str, names: Names) -> tuple[Tensors, Slots]:
        return super().send(server, client, names)[0], {"control": server.state["control"]}

    def reduce(self, server: Server, updates: Iterable[Update], population: int) -> Aggregate:
        delta, control, cohort, weights = Mean(), Mean(), 0, PopulationWeights(self.weigh, server)
        for update in updates:
            cohort += 1
            weight = weights.add(update)
            delta.add(update.delta, weight)
            control.add(update.slots.get("control", {}), weight)
        slots = {"control": control.over(weights.total(population)), **weights.slots(population)}
        return Aggregate(delta.value, slots, cohort)

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        after = super().apply(server, replace(aggregate, delta=scale(aggregate.delta, self.lr)))
        control = rescaled(server.state["control"], server.state, aggregate.slots)
        state = {"control": add(control, aggregate.slots["control"]), **remembered(aggregate.slots)}
        return replace(after, state=state)


def scaffold(lr: NotNegative = 1.0, weigh: Weigh = "clients") -> Method:
    """Build SCAFFOLD.

    Args:
        lr: The server learning rate.
        weigh: How clients count: all alike as in the paper, or by their numbers of examples as in FedAvg. The method
            rests at the optimum of the mean loss that is weighted so.
    """
    return Method("scaffold", client_rules=(ScaffoldClient(),), server_rule=ScaffoldServer(lr, weigh))
