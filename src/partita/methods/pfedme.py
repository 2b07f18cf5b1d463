"""pFedMe: the shared model moves to the clients' own models, each of which solves a proximal problem around it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from partita.core.client_rule import ClientRule, Context, GradientAt
from partita.core.data import Examples
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.options import Count, Positive
from partita.core.personal_copy import PlanWithCopy, add_personal_copy, copy_name, personal_values
from partita.core.rng import Key
from partita.core.server_rule import Server, ServerRule, average
from partita.core.tensors import Slots, Tensors, scale
from partita.core.update import Aggregate, Update

PLAIN_SGD = frozenset({"sgd"})


@dataclass(frozen=True)
class PFedMeClient(ClientRule):
    """In each step, first theta takes `inner_steps` steps on f(theta) + (lam / 2) |theta - w|^2, then w moves to theta.

    Theta is the personal copy. It starts at w in every round and goes on from step to step.
    """

    lam: float
    inner_steps: int
    inner_lr: float
    optimizers = PLAIN_SGD

    def start(self, params: Tensors, examples: Examples, ctx: Context, key: Key) -> tuple[Tensors, Slots]:
        return {copy: params[name] for name in params if (copy := copy_name(name)) in ctx.plan.train}, {}

    def step_gradient(self, gradient_at: GradientAt, params: Tensors, ctx: Context) -> Tensors:
        theta = personal_values(params)
        for _ in range(self.inner_steps):
            grads = gradient_at(theta)
            theta |= {
                name: theta[name] - self.inner_lr * (grads[name] + self.lam * (theta[name] - params[name]))
                for name in theta
                if name in grads
            }
        moved = [name for name in theta if name in grads]
        shared = {name: self.lam * (params[name] - theta[name]) for name in moved}
        # The gradients with which plain SGD steps from the old theta to the new one.
        own = {copy_name(name): (params[copy_name(name)] - theta[name]) / ctx.lr for name in moved}
        return {**grads, **shared, **own}


@dataclass(frozen=True)
class PFedMeServer(ServerRule):
    """Server step w + beta · (unweighted mean of the updates)."""

    beta: float

    def reduce(self, server: Server, updates: Iterable[Update], population: int) -> Aggregate:
        return average(updates, weigh=lambda update: 1.0)

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        return super().apply(server, replace(aggregate, delta=scale(aggregate.delta, self.beta)))


def pfedme(
    lam: Positive = 15.0,
    inner_steps: Count = 5,
    inner_lr: Positive = 0.03,
    beta: Positive = 1.0,
    copied: tuple[str, ...] = (),
) -> Method:
    """Build pFedMe.

    Args:
        lam: Weight of the proximal term between a client's own model and the shared one.
        inner_steps: Steps on a batch towards the solution of the proximal problem.
        inner_lr: Learning rate of these steps. The run's own learning rate is that of the shared model.
        beta: Step of the server to the mean of the clients' models; 1: all the way.
        copied: Tags of the parameters with a personal copy. Empty: all.

    Raises:
        MethodError: If `inner_steps` is below 1, or if another number is not above 0.
    """
    if inner_steps < 1 or min(lam, inner_lr, beta) <= 0:
        raise MethodError(
            f"method.lam is {lam}, inner_steps {inner_steps}, inner_lr {inner_lr} and beta {beta}; give 1 or more "
            "inner_steps, and more than 0 for the others"
        )
    return Method(
        "pfedme",
        plan=PlanWithCopy(),
        client_rules=(PFedMeClient(lam, inner_steps, inner_lr),),
        server_rule=PFedMeServer(beta),
        extend=lambda model, key: add_personal_copy(model, copied),
    )
