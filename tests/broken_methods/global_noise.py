"""Clients that draw from torch's global random state."""

import torch

from partita import ClientRule, Context, Method
from partita.core.tensors import Tensors


class Noise(ClientRule):
    def gradient(self, grads: Tensors, ctx: Context) -> Tensors:
        return {name: grad + 0.1 * torch.rand(grad.shape, dtype=grad.dtype) for name, grad in grads.items()}


def broken() -> Method:
    return Method("broken", client_rules=(Noise(),))
