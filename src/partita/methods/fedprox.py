"""FedProx: a proximal term keeps each client near the model it received."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from partita.core.client_rule import ClientRule, Context
from partita.core.data import Batch
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Output
from partita.core.options import NotNegative
from partita.core.tensors import Tensors


@dataclass(frozen=True)
class FedProxClient(ClientRule):
    """Proximal term (mu / 2) |w - anchor|^2 over the trained parameters that came from the server.

    Parameters that stay on the client have no global anchor.
    """

    mu: float

    @property
    def proximal(self) -> bool:
        return self.mu > 0

    def penalty(self, out: Output, params: Tensors, batch: Batch, ctx: Context) -> torch.Tensor | None:
        held = sorted(ctx.plan.train & ctx.plan.down)
        squares = [((params[name] - ctx.anchor[name]) ** 2).sum() for name in held]
        return 0.5 * self.mu * torch.stack(squares).sum() if squares else None


def fedprox(mu: NotNegative = 0.01) -> Method:
    """Build FedProx with the proximal weight `mu`.

    Raises:
        MethodError: If `mu` is below 0.
    """
    if mu < 0:
        raise MethodError(f"method.mu is {mu}; the proximal weight cannot be negative")
    return Method("fedprox", client_rules=(FedProxClient(mu),))
