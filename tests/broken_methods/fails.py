"""A client rule with a mistake in it."""

from torch import Tensor

from partita import ClientRule, Context, Method
from partita.core.data import Batch
from partita.core.model import Output
from partita.core.tensors import Tensors


class Mistake(ClientRule):
    def penalty(self, out: Output, params: Tensors, batch: Batch, ctx: Context) -> Tensor:
        return params["no such name"].sum()


def broken() -> Method:
    return Method("broken", client_rules=(Mistake(),))
