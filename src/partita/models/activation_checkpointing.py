"""Activation checkpointing: drop the activations of a layer and recompute them in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from partita.core.torch_private import is_batchedtensor, is_gradtrackingtensor, own_parameters
from partita.models import ModelError
from partita.models.dropout import DropoutDraws


@dataclass(frozen=True, eq=False)
class _Recompute:
    """Checkpoints a layer. The backward pass runs after the parameters were removed, so it reinstalls them."""

    layer: nn.Module
    draws: DropoutDraws | None

    def __call__(self, run: Callable[..., Any], *inputs: Any) -> Any:
        if any(isinstance(item, Tensor) and (is_batchedtensor(item) or is_gradtrackingtensor(item)) for item in inputs):
            raise ModelError(
                "checkpointing does not work under vmap over clients or examples; set engine.clients_per_block = 1 "
                "and turn off example-level privacy, or set model.checkpointing = false"
            )
        seeds, calls = (None, {}) if self.draws is None else (self.draws.seeds, dict(self.draws.calls))
        saved = [(own_parameters(part), dict(own_parameters(part))) for part in self.layer.modules()]

        def compute(*inputs: Any) -> Any:
            before = [dict(current) for current, _ in saved]
            for current, values in saved:
                current.update(values)
            try:
                if self.draws is None or self.draws.seeds is not None:  # no dropout, or the first run
                    return run(*inputs)
                with self.draws.using(seeds, dict(calls)):  # the same masks again
                    return run(*inputs)
            finally:
                for (current, _), values in zip(saved, before, strict=True):
                    current.update(values)

        # A layer draws no random numbers from torch's generator.
        return checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False)


def checkpoint_layers(module: nn.Module, draws: DropoutDraws | None) -> None:
    """Turn on activation checkpointing in all layers of a module that support it.

    Args:
        module: The module.
        draws: What its dropout layers draw from; None if it has none.
    """
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = True
            object.__setattr__(layer, "_gradient_checkpointing_func", _Recompute(layer, draws))
            layer.training = True  # transformers requires it; no layer reads it otherwise
