"""FedLESAM: gradients at a point uphill for all clients, estimated from how the received global model moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partita.core.client_rule import ClientRule, Context, GradientAt
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.options import NotNegative
from partita.core.plan import Plan
from partita.core.tensors import Slots, Tensors, select
from partita.methods.fedsam import perturbed


@dataclass(frozen=True)
class FedLESAMClient(ClientRule):
    """The gradient at w + rho * d / |d|, where d is the global model received last time minus the one received now.

    The perturbation covers the trained parameters that come from the server, and stays the same for the whole round. In
    a client's first round it is zero.

    Attributes:
        rho: The length of the perturbation.
    """

    rho: float
    slots = frozenset({"received"})

    def memory(self, anchor: Tensors) -> Slots:
        return {"received": anchor}

    def step_gradient(self, gradient_at: GradientAt, params: Tensors, ctx: Context) -> Tensors:
        last = ctx.memory["received"]
        uphill = {name: last[name] - ctx.anchor[name] for name in _shared(ctx.plan)}
        return gradient_at(perturbed(params, uphill, self.rho))

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        return {}, {"received": select(ctx.anchor, _shared(ctx.plan))}


def _shared(plan: Plan) -> list[str]:
    return sorted(plan.train & plan.down)


def fedlesam(rho: NotNegative = 0.05) -> Method:
    """Build FedLESAM with perturbations of length `rho`.

    Raises:
        MethodError: If `rho` is below 0.
    """
    if rho < 0:
        raise MethodError(f"method.rho is {rho}; the length of the perturbation cannot be negative")
    return Method("fedlesam", client_rules=(FedLESAMClient(rho),))
