"""FedDyn: linear and proximal terms in each client's loss, so that clients can only agree at the global optimum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from partita.core.client_rule import ClientRule, Context
from partita.core.data import Batch
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model, Output
from partita.core.options import Positive
from partita.core.server_rule import Server, ServerRule
from partita.core.tensors import Mean, Slots, Tensors, add, scale, subtract, zeros_like
from partita.core.update import Aggregate, Update
from partita.methods.client_weights import PopulationWeights, Weigh, remembered, rescaled
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

    def penalty(self, out: Output, params: Tensors, batch: Batch, ctx: Context) -> torch.Tensor | None:
        shared = sorted(ctx.plan.up)
        inner = [(ctx.memory["tilt"][name] * params[name]).sum() for name in shared]
        return -torch.stack(inner).sum() if inner else None

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        moved = {name: params[name] - ctx.anchor[name] for name in sorted(ctx.plan.up)}
        tilt = {name: ctx.memory["tilt"][name] for name in moved}
        return {}, {"tilt": subtract(tilt, scale(moved, self.alpha))}


@dataclass(frozen=True)
class FedDynServer(ServerRule):
    """Mean over the clients that answered, minus the mean tilt h of all clients divided by alpha.

    With the weights p_i of the clients, consider sum_i p_i [f_i(w_i) - <g_i, w_i - w> + alpha/2 |w_i - w|^2], the
    augmented Lagrangian of min sum_i p_i f_i(w_i) subject to w_i = w. In it each client's own problem, divided by p_i,
    has the same alpha, so clients need not know their weights. Its minimum over w is
    sum_i p_i w_i - h / alpha with h = sum_i p_i g_i, so the weights enter here only. At rest all w_i = w, hence h = 0,
    and g_i = grad f_i(w): sum_i p_i grad f_i(w) = 0, which is the optimum of sum_i p_i f_i.

    Attributes:
        alpha: The regularization weight.
        weigh: How clients count: p_i = 1 / N with "clients", n_i / sum_j n_j with "examples".
    """

    alpha: float
    weigh: Weigh = "clients"

    @property
    def needs_sizes(self) -> bool:
        return self.weigh == "examples"

    def init(self, model: Model) -> Slots:
        return {"tilt": zeros_like(model.initial)}

    def reduce(self, server: Server, updates: Iterable[Update], population: int) -> Aggregate:
        delta, cohort, weights = Mean(), 0, PopulationWeights(self.weigh, server)
        for update in updates:
            cohort += 1
            delta.add(update.delta, weights.add(update))
        slots = {"moved": delta.over(weights.total(population)), **weights.slots(population)}
        return Aggregate(delta.value, slots, cohort)

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        tilt = rescaled(server.state["tilt"], server.state, aggregate.slots)
        tilt = add(tilt, scale(aggregate.slots["moved"], -self.alpha))
        delta = {name: value - tilt[name] / self.alpha for name, value in aggregate.delta.items()}
        state = {"tilt": tilt, **remembered(aggregate.slots)}
        return replace(super().apply(server, replace(aggregate, delta=delta)), state=state)


def feddyn(alpha: Positive = 0.01, weigh: Weigh = "clients") -> Method:
    """Build FedDyn.

    Args:
        alpha: The regularization weight.
        weigh: How clients count: all alike as in the paper, or by their numbers of examples as in FedAvg. The method
            rests at the optimum of the mean loss that is weighted so.

    Raises:
        MethodError: If `alpha` is not above 0.
    """
    if alpha <= 0:
        raise MethodError(f"method.alpha is {alpha}; it must be above 0 because the server divides by it")
    rules = (FedProxClient(alpha), FedDynClient(alpha))
    return Method("feddyn", client_rules=rules, server_rule=FedDynServer(alpha, weigh))
