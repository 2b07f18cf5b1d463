"""FedSAM: clients minimize the worst loss nearby, with gradients at a point uphill (sharpness-aware minimization)."""

from __future__ import annotations

from dataclasses import dataclass

from partita.core.client_rule import ClientRule, Context, GradientAt
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.options import NotNegative
from partita.core.tensors import Tensors, norm, scale

TINY = 1e-12  # a direction shorter than this counts as no direction


@dataclass(frozen=True)
class FedSAMClient(ClientRule):
    """The gradient at w + rho * g / |g|, where g is the gradient at w. The norm is over all names that train together.

    Attributes:
        rho: The length of the perturbation.
    """

    rho: float

    def step_gradient(self, gradient_at: GradientAt, params: Tensors, ctx: Context) -> Tensors:
        return gradient_at(perturbed(params, gradient_at({}), self.rho))


def perturbed(params: Tensors, direction: Tensors, rho: float) -> Tensors:
    """Return the parameters in `direction`, moved along it by the distance `rho`; unmoved if it is zero."""
    step = scale(direction, rho / norm(direction).clamp(min=TINY))
    return {name: params[name] + value for name, value in step.items()}


def fedsam(rho: NotNegative = 0.05) -> Method:
    """Build FedSAM with perturbations of length `rho`.

    Raises:
        MethodError: If `rho` is below 0.
    """
    if rho < 0:
        raise MethodError(f"method.rho is {rho}; the length of the perturbation cannot be negative")
    return Method("fedsam", client_rules=(FedSAMClient(rho),))
