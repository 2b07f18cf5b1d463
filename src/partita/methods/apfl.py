"""APFL: a client's model is a mixture of the shared model and a model of its own, and can learn the mixing weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from partita.core.client_rule import ClientRule, Context, GradientAt
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model
from partita.core.options import Share
from partita.core.personal_copy import (
    PERSONAL,
    PREFIX,
    PersonalCopyModel,
    PlanWithCopy,
    add_personal_copy,
    copy_name,
    personal_values,
)
from partita.core.tensors import Names, Tensors

ALPHA = PREFIX + "alpha"  # the mixing weight, a scalar that the client keeps
PLAIN_SGD = frozenset({"sgd"})


def mixed_values(params: Tensors) -> Tensors:
    """Return alpha v + (1 - alpha) w for the parameters w that have a copy v, by the names of w."""
    alpha = params[ALPHA]
    return {name: alpha * own + (1 - alpha) * params[name] for name, own in personal_values(params).items()}


class MixedModel(PersonalCopyModel):
    """A model with a personal copy, evaluated at the mixture."""

    def personal(self, params: Tensors) -> Tensors:
        return {**params, **mixed_values(params)}


@dataclass(frozen=True)
class APFLClient(ClientRule):
    """Joint steps: w by the gradient at w, v and alpha by the gradient at the mixture.

    Attributes:
        adaptive: Whether alpha trains.
        optimizers: The local optimizers for which the rule is valid.
    """

    adaptive: bool
    optimizers: Names | None = None

    def step_gradient(self, gradient_at: GradientAt, params: Tensors, ctx: Context) -> Tensors:
        own, alpha = personal_values(params), params[ALPHA]
        at_mixture = {name: grad for name, grad in gradient_at(mixed_values(params)).items() if name in own}
        grads = {**gradient_at({}), **{copy_name(name): alpha * grad for name, grad in at_mixture.items()}}
        if self.adaptive:
            along = sum(((own[name] - params[name]) * grad).sum() for name, grad in at_mixture.items())
            # The gradient of a step that ends in [0, 1].
            grads[ALPHA] = (alpha - torch.clamp(alpha - ctx.lr * along, 0, 1)) / ctx.lr
        return grads


def apfl(alpha: Share = 0.5, adaptive: bool = True, copied: tuple[str, ...] = ()) -> Method:
    """Build APFL.

    Args:
        alpha: Weight of a client's own model in the mixture, at the start.
        adaptive: Whether each client learns its alpha by gradient descent.
        copied: Tags of the parameters with a personal copy. Empty: all.

    Raises:
        MethodError: If `alpha` is not in [0, 1].
    """
    if not 0 <= alpha <= 1:
        raise MethodError(f"method.alpha is {alpha}; a mixing weight is from 0 to 1")

    def extend(model: Model) -> Model:
        both = add_personal_copy(model, copied)
        first = next(iter(model.initial.values()))
        initial = {**both.initial, ALPHA: first.new_full((), alpha)}
        return MixedModel(both.base, both.name, initial, {**both.tags, ALPHA: frozenset({PERSONAL})})

    return Method(
        "apfl",
        plan=PlanWithCopy(),
        client_rules=(APFLClient(adaptive, PLAIN_SGD if adaptive else None),),
        extend=lambda model, key: extend(model),
    )
