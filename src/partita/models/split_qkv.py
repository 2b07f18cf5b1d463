"""Split GPT-2's fused query-key-value projection into three parameters, because a plan never slices a parameter."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from partita.core.tensors import Tensors

PARTS, LEAVES = ("query", "key", "value"), ("weight", "bias")


class _Part(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())


class SplitQKV(nn.Module):
    """Replaces a fused Conv1D, whose weight is (in, out). It computes the same in one matmul."""

    def __init__(self, fused: Conv1D) -> None:
        super().__init__()
        weights, biases = (value.detach().chunk(len(PARTS), -1) for value in (fused.weight, fused.bias))
        for name, weight, bias in zip(PARTS, weights, biases, strict=True):
            self.add_module(name, _Part(weight, bias))

    def forward(self, state: Tensor) -> Tensor:  # (example, token, width)
        weight, bias = (torch.cat([getattr(self.get_submodule(p), leaf) for p in PARTS], -1) for leaf in LEAVES)
        return torch.addmm(bias, state.flatten(0, 1), weight).unflatten(0, state.shape[:2])


def split(module: nn.Module) -> None:
    """Replace each fused projection in a module by a SplitQKV, in place."""
    for part in list(module.modules()):
        if isinstance(fused := getattr(part, "c_attn", None), Conv1D):
            part.c_attn = SplitQKV(fused)


def join(module: nn.Module, state: Tensors) -> Tensors:
    """Return the state dict with fused projections, in the names and shapes of transformers."""
    joined = dict(state)
    for path, part in module.named_modules():
        if isinstance(part, SplitQKV):
            for leaf in LEAVES:
                joined[f"{path}.{leaf}"] = torch.cat([joined.pop(f"{path}.{name}.{leaf}") for name in PARTS], -1)
    return joined
