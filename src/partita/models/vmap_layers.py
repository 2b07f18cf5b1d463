"""Layers that stay fast under torch.vmap over clients."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from partita.core.torch_private import is_batchedtensor


class Linear(torch.nn.Linear):
    """nn.Linear that keeps the autocast dtype under vmap."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _linear(inputs, self.weight, self.bias)


class Conv1d(torch.nn.Conv1d):
    """nn.Conv1d that keeps the autocast dtype under vmap."""

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super()._conv_forward(*_in_autocast(input, weight, input, weight, bias))


class Conv2d(torch.nn.Conv2d):
    """nn.Conv2d that keeps the autocast dtype under vmap."""

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super()._conv_forward(*_in_autocast(input, weight, input, weight, bias))


class LinearPatchEmbedding(torch.nn.Conv2d):
    """A convolution with non-overlapping windows, computed as a linear layer on each window.

    vmap turns the clients' convolutions into one grouped convolution, which is many times slower than a batched matmul.
    """

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        height, width = self.kernel_size
        rows, columns = pixels.shape[-2] // height, pixels.shape[-1] // width
        windows = (
            pixels[..., : rows * height, : columns * width]
            .unflatten(-2, (rows, height))
            .unflatten(-1, (columns, width))
        )
        windows = windows.permute(0, 2, 4, 1, 3, 5).flatten(3)  # (example, row, column, number)
        return _linear(windows, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def use_vmap_layers(module: torch.nn.Module) -> None:
    """Replace the layers of a module in place. Parameters keep their names and values."""
    for part in module.modules():
        if type(part) is torch.nn.Linear:
            part.__class__ = Linear
        elif type(part) is torch.nn.Conv2d and _has_disjoint_windows(part):
            part.__class__ = LinearPatchEmbedding
        elif type(part) is torch.nn.Conv2d:
            part.__class__ = Conv2d
        elif type(part) is torch.nn.Conv1d:
            part.__class__ = Conv1d


def _linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return linear(inputs, weight, *_in_autocast(inputs, weight, bias))


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`functional.linear`, which the compiler can follow under vmap."""
    if torch.compiler.is_compiling() and inputs.ndim > 2:
        # Flatten to rows: with more dimensions, vmap needs a count that torch before 2.13 lacks for symbolic shapes.
        return functional.linear(inputs.flatten(0, -2), weight, bias).unflatten(0, inputs.shape[:-1])
    return functional.linear(inputs, weight, bias)


def _in_autocast(inputs: torch.Tensor, weight: torch.Tensor, *parts: Any) -> tuple[Any, ...]:
    """Cast the parts of a layer that autocast misses under vmap: later layers would run in float32 or refuse them."""
    batched = torch.compiler.is_compiling() or is_batchedtensor(inputs) or is_batchedtensor(weight)
    if inputs.is_meta or not batched or not torch.is_autocast_enabled(inputs.device.type):
        return parts
    dtype = torch.get_autocast_dtype(inputs.device.type)
    return tuple([None if part is None else part.to(dtype) for part in parts])


def _has_disjoint_windows(part: torch.nn.Conv2d) -> bool:
    plain = part.groups == 1 and part.dilation == (1, 1) and part.padding in ((0, 0), "valid")
    return plain and part.kernel_size == part.stride


def is_layer(part: torch.nn.Module) -> bool:
    """Whether a module is a layer of a Transformer: transformers and `vision_transformer` mark them by their class."""
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(part).__mro__)
