"""Activation checkpointing: layers forget what they computed and compute it again on the way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor, is_gradtrackingtensor  # torch has no public name for these
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from partita.models import ModelError


@dataclass(frozen=True, eq=False)
class _Recompute:
    """On the way back the parameters that were lent for the call are gone, so they are lent to the layer once more."""

    layer: nn.Module

    def __call__(self, run: Callable[..., Any], *inputs: Any) -> Any:
        if any(isinstance(each, Tensor) and (is_batchedtensor(each) or is_gradtrackingtensor(each)) for each in inputs):
            raise ModelError(
                "checkpointing cannot be lifted by vmap, over clients or over examples; "
                "set engine.clients_per_block = 1 and no example-level privacy, or model.checkpointing = false"
            )
        lent = [(part._parameters, dict(part._parameters)) for part in self.layer.modules()]

        def compute(*inputs: Any) -> Any:
            before = [dict(own) for own, _ in lent]
            for own, values in lent:
                own.update(values)
            try:
                return run(*inputs)
            finally:
                for (own, _), values in zip(lent, before, strict=True):
                    own.update(values)

        # Nothing is drawn in a layer, since dropout is off.
        return checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False)


def checkpoint_layers(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = True
            object.__setattr__(layer, "_gradient_checkpointing_func", _Recompute(layer))
            layer.training = True  # transformers asks for it; of the layer's parts, which hold dropout, none is
