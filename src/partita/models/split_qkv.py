"""GPT-2 projects to query, key and value with one matrix. A plan never slices, so here they are three parameters."""

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
    """Stands for a Conv1D, whose weight is (width in, width out), and computes the same in one product."""

    def __init__(self, whole: Conv1D) -> None:
        super().__init__()
        weights, biases = (value.detach().chunk(len(PARTS), -1) for value in (whole.weight, whole.bias))
        for name, weight, bias in zip(PARTS, weights, biases, strict=True):
            self.add_module(name, _Part(weight, bias))

    def forward(self, state: Tensor) -> Tensor:  # (example, token, width)
        weight, bias = (torch.cat([getattr(self.get_submodule(p), leaf) for p in PARTS], -1) for leaf in LEAVES)
        return torch.addmm(bias, state.flatten(0, 1), weight).unflatten(0, state.shape[:2])


def split(module: nn.Module) -> None:
    """Put three named parameters in the place of each fused one."""
    for part in list(module.modules()):
        if isinstance(whole := getattr(part, "c_attn", None), Conv1D):
            part.c_attn = SplitQKV(whole)


def join(module: nn.Module, state: Tensors) -> Tensors:
    """A state dict with the names and shapes that transformers knows."""
    joined = dict(state)
    for path, part in module.named_modules():
        if isinstance(part, SplitQKV):
            for leaf in LEAVES:
                joined[f"{path}.{leaf}"] = torch.cat([joined.pop(f"{path}.{name}.{leaf}") for name in PARTS], -1)
    return joined
