"""The smallest model with two parameters, whose losses and gradients are known by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.core.data import Batch
from partita.core.model import Model, Output
from partita.core.tensors import Tensors


class Line(Model):
    """x @ w + b with half the squared error, so a gradient is the error times the input."""

    name = "line"
    tags = {"b": frozenset({"head"}), "w": frozenset({"mlp"})}  # noqa: RUF012

    def __init__(self) -> None:
        self.initial = {"w": torch.tensor([1.0, -2.0]), "b": torch.tensor(0.5)}

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        return Output(inputs["x"] @ params["w"] + params["b"])

    def losses(self, out: Output, targets: Tensor) -> Tensor:
        return (out.logits - targets).square() / 2


def line_batch(count: int = 3, mask: Tensor | None = None) -> Batch:
    """Examples with different errors at the initial parameters."""
    x = torch.arange(2.0 * count).reshape(count, 2) / 4
    return Batch({"x": x}, torch.arange(count) - 1.0, mask)


def line_errors(params: Tensors, batch: Batch) -> Tensor:
    return batch.inputs["x"] @ params["w"] + params["b"] - batch.targets


def line_gradient(params: Tensors, batch: Batch) -> Tensors:
    """The gradient of the mean loss over the examples that the mask does not exclude."""
    errors = line_errors(params, batch)
    mask = torch.ones_like(errors) if batch.mask is None else batch.mask
    errors = errors * mask / mask.sum()
    return {"w": errors @ batch.inputs["x"], "b": errors.sum()}
