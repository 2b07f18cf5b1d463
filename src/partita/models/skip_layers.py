"""Run a model without some of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from partita.core.model import Output, layer_number
from partita.core.tensors import Names, Tensors
from partita.models import ModelError
from partita.models.architectures import architecture
from partita.models.functional import FunctionalModel


def skip_layers(model: FunctionalModel, without: Names) -> FunctionalModel:
    """Return a model in which the layers with these tags return their input unchanged.

    Raises:
        ModelError: If the architecture does not support it.
    """
    model_type = str(model.module.config.model_type)
    start = architecture(model_type).start
    if start is None:
        raise ModelError(f"cannot skip layers of a '{model_type}'; use another model, or all layers")
    layers: Any = model.module.base_model.get_submodule(start.layers)
    skipped = tuple(layers[layer_number(tag)] for tag in sorted(without, key=layer_number))
    return replace(model, forward=_SkippingForward(model.forward, skipped))


@dataclass(frozen=True, eq=False)
class _SkippingForward:
    forward: Callable[[Any, Tensors], Output]
    layers: tuple[torch.nn.Module, ...]

    def __call__(self, module: Any, inputs: Tensors) -> Output:
        with patched_forward(self.layers, _identity):
            return self.forward(module, inputs)


def _identity(states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return states


@contextmanager
def patched_forward(parts: Sequence[torch.nn.Module], forward: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Replace the forward method of `parts` by `forward` inside the block."""
    before = [vars(part).get("forward") for part in parts]
    for part in parts:
        part.forward = forward
    try:
        yield
    finally:
        for part, own in zip(parts, before, strict=True):
            if own is None:
                del part.forward
            else:
                part.forward = own
