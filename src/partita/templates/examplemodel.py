"""examplemodel: a perceptron with one hidden layer, for images."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch.nn import functional

from partita import Key, Model, Range
from partita.core import tensors
from partita.core.model import Output
from partita.core.tensors import Names, Tensors
from partita.tasks import TaskInfo


class Perceptron(Model):
    """A pure function of its parameters: a call changes nothing, and works in torch.vmap.

    Attributes:
        initial: The initial value of every parameter by name.
        tags: The tags of every parameter. Methods choose by them what trains, travels and stays.
    """

    def __init__(self, task: TaskInfo, key: Key, width: int) -> None:
        pixels, classes = task.channels * task.size**2, len(task.classes)
        parts: dict[str, tuple[tuple[int, ...], Names]] = {
            "embedding.weight": ((width, pixels), frozenset({"embedding"})),
            "hidden.weight": ((width, width), frozenset({"mlp", "layer.0"})),
            "hidden.bias": ((width,), frozenset({"mlp", "layer.0"})),
            "head.weight": ((classes, width), frozenset({"head"})),
            "head.bias": ((classes,), frozenset({"head"})),
        }
        self.name, self.kind = "examplemodel", task.kind
        self.tags = {name: tags for name, (_, tags) in parts.items()}
        self.initial = {
            name: torch.randn(shape, generator=(key / name).generator()) / math.sqrt(shape[-1])
            for name, (shape, _) in parts.items()
        }

    def to(self, device: torch.device) -> None:
        self.initial = tensors.to(self.initial, device)

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        pixels = inputs["pixel_values"].flatten(1)  # (example, pixel)
        state = functional.relu(functional.linear(pixels, params["embedding.weight"]))
        state = functional.relu(functional.linear(state, params["hidden.weight"], params["hidden.bias"]))
        return Output(functional.linear(state, params["head.weight"], params["head.bias"]), state)

    def losses(self, out: Output, targets: torch.Tensor) -> torch.Tensor:
        return self.kind.loss(out.logits, targets)  # (example,)


# Every argument except `task` and `key` is an option in the config. Its range is checked.
def examplemodel(
    task: TaskInfo,
    key: Key,
    *,
    width: Annotated[int, Range(low=1, high=10_000), "hidden size"] = 32,
) -> Model:
    """A perceptron for the images of the task."""
    if task.kind.inputs != "image":
        raise ValueError(f"examplemodel takes images, not a task of kind '{task.kind.name}'; choose another model")
    return Perceptron(task, key, width)
