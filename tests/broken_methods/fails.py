"""A client rule with a mistake in it."""

from torch import Tensor

from partita import Batch, ClientRule, Context, Method, Output, Tensors


class Mistake(ClientRule):
    def penalty(self, out: Output, params: Tensors, batch: Batch, ctx: Context) -> Tensor:
        return params["no such name"].sum()


def broken() -> Method:
    return Method("broken", client_rules=(Mistake(),))
