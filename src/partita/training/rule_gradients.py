"""Gradients of a training step that a client rule computes with `ClientRule.step_gradient`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from partita.core.client_rule import ClientRule
from partita.core.method_error import MethodError
from partita.core.outside_vmap import outside_vmap
from partita.core.tensors import Slots, Tensors
from partita.training.client_axis import ClientAxis, ClientVmap
from partita.training.gradients import GradientEstimator, Lift, PlainGradients
from partita.training.objective import Objective


def step_gradients(objective: Objective, axis: ClientAxis, lift: Lift | None = None) -> GradientEstimator:
    """Return the gradients of training without privacy: the plain ones, or those of a rule with `step_gradient`.

    The arguments are those of `PlainGradients`.
    """
    plain = PlainGradients(objective, axis, lift)
    return plain if objective.step_rule is None else RuleGradients(objective.step_rule, plain, axis)


class RuleGradients:
    """The gradient that a rule's `step_gradient` returns.

    The rule is written for one client and runs under `torch.vmap`. A gradient that it asks for is computed outside
    `vmap` for the whole block, with one ordinary backward pass. So it equals that of a step without such a rule.

    Args:
        rule: The rule.
        plain: Computes the gradient at a point.
        axis: The clients.
    """

    def __init__(self, rule: ClientRule, plain: PlainGradients, axis: ClientAxis) -> None:
        self.rule, self.plain, self.axis = rule, plain, axis
        self.lift = ClientVmap(axis, str(plain.objective))

    def __call__(
        self, trainable: Tensors, values: Sequence[Any], dims: Sequence[Any], count: int
    ) -> tuple[Tensors, torch.Tensor]:
        names, losses = list(trainable), list[torch.Tensor]()

        def evaluate(point: Tensors, unchanged: bool) -> Tensors:
            with torch.enable_grad():
                grads, task = self.plain.at(point, names, values, dims)
            if unchanged:
                losses.append(task.detach())
            return grads

        def of_one(trainable: Tensors, frozen: Tensors, anchor: Tensors, sent: Slots, memory: Slots) -> Tensors:
            params = {**frozen, **trainable}

            def gradient_at(point: Tensors) -> Tensors:
                if stray := point.keys() - params.keys():
                    raise MethodError(
                        f"{type(self.rule).__name__} asks for the gradient at a value of '{min(stray)}', which "
                        f"{self.plain.objective.model.name} does not have; use names of the model"
                    )
                unchanged = all(value is params[name] for name, value in point.items())
                # A frozen parameter at another value joins the trained ones, which take precedence in the loss.
                whole = {**trainable, **point} if not unchanged else trainable
                return self._leave_vmap(lambda whole: evaluate(whole, unchanged), whole, trainable)

            ctx = self.plain.objective.context(anchor, sent, memory)
            found = self.rule.step_gradient(gradient_at, params, ctx)
            return {name: found[name] for name in names if name in found}

        with torch.no_grad():
            grads = self.lift(of_one, dims[:5])(trainable, *values[:4])
        return grads, losses[0] if losses else self.plain.task_losses(trainable, values, dims)

    def _leave_vmap(self, evaluate: Callable[[Tensors], Tensors], point: Tensors, batched: Tensors) -> Tensors:
        """Call `evaluate` with a point that has the client dimension, if there are several clients."""
        if not self.axis.many:
            return evaluate(point)
        found: list[str] = []

        def call(values: Sequence[torch.Tensor], dims: Sequence[int | None]) -> tuple[torch.Tensor, ...]:
            clients = values[-1].shape[dims[-1] or 0]
            stacked = [
                value.expand(clients, *value.shape) if dim is None else value.movedim(dim, 0)
                for value, dim in zip(values, dims, strict=True)
            ]
            grads = evaluate(dict(zip(point, stacked[:-1], strict=True)))
            found.extend(grads)
            return tuple(grads.values())

        # The last value makes sure that at least one has the client dimension: a point may be the same for all.
        grads = outside_vmap(call, [*point.values(), next(iter(batched.values()))])
        return dict(zip(found, grads, strict=True))
