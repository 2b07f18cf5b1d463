"""Split a fused query-key-value projection into three parameters, because a plan never slices a parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from partita.core.tensors import Tensors
from partita.models.vmap_layers import Linear, linear

PARTS, LEAVES = ("query", "key", "value"), ("weight", "bias")
# Which outputs of the fused projection are queries, keys and values.
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _thirds(attention: Any, count: int) -> Outputs:
    """All queries, then all keys, then all values."""
    query, key, value = torch.arange(count).chunk(3)
    return query, key, value


def _grouped(attention: Any, count: int) -> Outputs:
    """As `_thirds`, with fewer key and value heads than query heads."""
    shared = attention.num_key_value_heads * attention.head_dim
    query, key, value = torch.arange(count).split([count - 2 * shared, shared, shared])
    return query, key, value


def _by_head(attention: Any, count: int) -> Outputs:
    """For each head its query, its key and its value."""
    heads = getattr(attention, "num_heads", None) or attention.config.num_attention_heads
    query, key, value = torch.arange(count).view(heads, 3, -1).transpose(0, 1).flatten(1)
    return query, key, value


# By model type: the name of the fused projection in an attention module, and how its outputs are ordered.
FUSED: dict[str, tuple[str, Callable[[Any, int], Outputs]]] = {
    "gpt2": ("c_attn", _thirds),
    "openai-gpt": ("c_attn", _thirds),
    "modernbert": ("Wqkv", _thirds),
    "mpt": ("Wqkv", _thirds),
    "phi3": ("qkv_proj", _grouped),
    "gpt_neox": ("query_key_value", _by_head),
    "bloom": ("query_key_value", _by_head),
    "persimmon": ("query_key_value", _by_head),
}


class Part(torch.nn.Module):
    """The parameters of the queries, the keys or the values. Not a layer: the three are computed in one matmul.

    Attributes:
        size: The number of outputs and of inputs.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone())
        self.bias = None if bias is None else torch.nn.Parameter(bias.clone())
        self.size = tuple(reversed(weight.shape)) if transposed else tuple(weight.shape)


class LinearPart(Linear):
    """A part as a layer of its own."""


class Conv1DPart(Conv1D):
    """A part as a layer of its own, whose weight is (in, out)."""


class SplitQKV(torch.nn.Module):
    """Replaces a fused Conv1D or nn.Linear. It computes the same in one matmul, unless its parts are separated.

    Args:
        fused: The fused projection.
        outputs: Which of its outputs are queries, keys and values.

    Attributes:
        outputs: The number of outputs of each part.
        order: The place of each output of the fused projection among those of the parts; None if it is the same.
    """

    def __init__(self, fused: Conv1D | torch.nn.Linear, outputs: Outputs) -> None:
        super().__init__()
        self.transposed = isinstance(fused, Conv1D)  # its weight is (in, out)
        self.has_bias = fused.bias is not None
        self.outputs = {name: len(chosen) for name, chosen in zip(PARTS, outputs, strict=True)}
        weight = fused.weight.detach()
        for name, chosen in zip(PARTS, outputs, strict=True):
            chosen = chosen.to(weight.device)
            part = weight.index_select(1 if self.transposed else 0, chosen)
            bias = fused.bias.detach().index_select(0, chosen) if self.has_bias else None
            self.add_module(name, Part(part, bias, self.transposed))
        order = torch.cat(outputs)
        in_order = torch.equal(order, torch.arange(len(order)))
        # Not a buffer: it must not be saved, and it must exist on every device.
        self.order = None if in_order else torch.argsort(order)
        self.separated = False

    def separate(self) -> None:
        """Make each part a layer, which is called, so that an adapter can be added to it. In place."""
        self.separated = True
        for part in (getattr(self, name) for name in PARTS):
            out, into = part.size
            if self.transposed:
                part.__class__, part.nf, part.nx = Conv1DPart, out, into
            else:
                part.__class__, part.out_features, part.in_features = LinearPart, out, into

    def forward(self, state: torch.Tensor) -> torch.Tensor:  # (example, token, width)
        if self.separated:
            joined = torch.cat([self.get_submodule(name)(state) for name in PARTS], -1)
            return joined if self.order is None else joined.index_select(-1, self.order.to(joined.device))
        weight, bias = self.fused("weight"), self.fused("bias") if self.has_bias else None
        if not self.transposed:
            return linear(state, weight, bias)
        assert bias is not None, "a Conv1D has a bias"
        return torch.addmm(bias, state.flatten(0, 1), weight).unflatten(0, state.shape[:2])

    def fused(self, leaf: str, values: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Return the fused weight or bias.

        Args:
            leaf: "weight" or "bias".
            values: The three parts by name. Default: those of this module.
        """
        parts = [getattr(self.get_submodule(name), leaf) if values is None else values[name] for name in PARTS]
        dim = 1 if self.transposed and leaf == "weight" else 0
        joined = torch.cat(parts, dim)
        return joined if self.order is None else joined.index_select(dim, self.order.to(joined.device))


def split(module: Any) -> None:
    """Replace each fused projection in a module by a SplitQKV, in place. Most architectures have none."""
    name, outputs = FUSED.get(str(module.config.model_type), ("", _thirds))
    for part in list(module.modules()):
        fused = getattr(part, name, None) if name else None
        if isinstance(fused, Conv1D | torch.nn.Linear):
            count = fused.nf if isinstance(fused, Conv1D) else fused.out_features
            setattr(part, name, SplitQKV(fused, outputs(part, count)))


def fused_name(module: torch.nn.Module, name: str) -> str:
    """Return the name of a parameter before `split`: that of the fused projection for one of its parts."""
    path, _, leaf = name.rpartition(".")
    owner, _, part = path.rpartition(".")
    return f"{owner}.{leaf}" if part in PARTS and isinstance(module.get_submodule(owner), SplitQKV) else name


def join(module: torch.nn.Module, state: Tensors) -> Tensors:
    """Return the state dict with fused projections, in the names and shapes of transformers."""
    joined = dict(state)
    for path, part in module.named_modules():
        if isinstance(part, SplitQKV):
            for leaf in LEAVES if part.has_bias else LEAVES[:1]:
                values = {name: joined.pop(f"{path}.{name}.{leaf}") for name in PARTS}
                joined[f"{path}.{leaf}"] = part.fused(leaf, values)
    return joined
