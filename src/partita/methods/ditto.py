"""Ditto: each client trains a model of its own beside the shared one, and a proximal term ties the two."""

from __future__ import annotations

from dataclasses import dataclass

from partita.core.client_rule import ClientRule, Context, GradientAt
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.options import NotNegative
from partita.core.personal_copy import PlanWithCopy, add_personal_copy, copy_name, personal_values
from partita.core.tensors import Tensors


@dataclass(frozen=True)
class DittoClient(ClientRule):
    """The shared model takes plain steps; the copy v takes steps on f(v) + (lam / 2) |v - anchor|^2."""

    lam: float

    def step_gradient(self, gradient_at: GradientAt, params: Tensors, ctx: Context) -> Tensors:
        own = personal_values(params)
        personal = gradient_at(own)
        pulled = {
            copy_name(name): grad + self.lam * (own[name] - ctx.anchor[name])
            for name, grad in personal.items()
            if name in own
        }
        return {**gradient_at({}), **pulled}


def ditto(lam: NotNegative = 1.0, copied: tuple[str, ...] = ()) -> Method:
    """Build Ditto.

    Args:
        lam: Weight of the proximal term between a client's own model and the shared one.
        copied: Tags of the parameters with a personal copy. Empty: all.

    Raises:
        MethodError: If `lam` is below 0.
    """
    if lam < 0:
        raise MethodError(f"method.lam is {lam}; the proximal weight cannot be negative")
    return Method(
        "ditto",
        plan=PlanWithCopy(),
        client_rules=(DittoClient(lam),),
        extend=lambda model, key: add_personal_copy(model, copied),
    )
