"""fedexample: FedAvg that pulls each client's model toward the one it received."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from partita import ClientRule, Context, Method, Range
from partita.core.data import Batch
from partita.core.model import Output
from partita.core.tensors import Tensors


@dataclass(frozen=True)
class Pull(ClientRule):
    """Adds pull / 2 times the squared distance from the received model to the loss.

    Hooks are pure: they store nothing in self and change no tensor in place. Several clients train at once in
    torch.vmap, so do not branch on tensor values. `ClientRule` has more hooks: memory, narrow, gradient, finish.
    """

    pull: float

    def penalty(self, out: Output, params: Tensors, batch: Batch, ctx: Context) -> torch.Tensor | None:
        # `params` are the parameters at this step, `ctx.anchor` those at the start of the client's round.
        shared = sorted(ctx.plan.train & ctx.plan.down)
        distances = [((params[name] - ctx.anchor[name]) ** 2).sum() for name in shared]
        return 0.5 * self.pull * torch.stack(distances).sum() if distances else None


# Every argument is an option in the config. Its range is checked, and `partita options` shows its meaning.
def fedexample(
    pull: Annotated[float, Range(low=0, high=1000), "weight of the pull toward the received model"] = 0.01,
) -> Method:
    """Build fedexample. What it leaves out is FedAvg's: the plan, the transforms of updates and the server rule."""
    return Method("fedexample", client_rules=(Pull(pull),))
