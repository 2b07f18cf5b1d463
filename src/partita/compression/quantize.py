"""Quantization: send updates in 8 bits per element, with unbiased stochastic rounding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from partita.compression import CompressionError
from partita.core.method import Method
from partita.core.rng import Key
from partita.core.tensors import Slots, Tensors
from partita.core.update import Update
from partita.core.update_transform import UpdateTransform

SCALE = "quantize_scale"
MAX_LEVEL = 127  # largest level of a symmetric int8
MIN_ELEMENTS = 64  # tensors up to this size are sent as they are: the header of a scale would cost more than is saved


def quantize(rows: bool = True) -> Method:
    """Build int8 quantization of updates, with one scale per row of a matrix (`rows`) or one per tensor."""
    return Method("quantize", transforms=(Int8Quantizer(rows),))


@dataclass(frozen=True)
class Int8Quantizer(UpdateTransform):
    """Quantize deltas to int8 with stochastic rounding; the scales are sent in a slot.

    Attributes:
        rows: Whether each row of a matrix has its own scale; otherwise each tensor has one.
    """

    rows: bool = True

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        delta: Tensors = {}
        scales: Tensors = {}
        for name, value in update.delta.items():
            if value.numel() <= MIN_ELEMENTS:
                delta[name] = value
                continue
            scales[name] = self._scale(value)
            draw = torch.rand(value.shape, generator=(key / name).generator(), dtype=value.dtype).to(value.device)
            steps = value / _along(scales[name], value).clamp(min=torch.finfo(value.dtype).tiny)
            delta[name] = (steps + draw).floor().clamp(-MAX_LEVEL, MAX_LEVEL).to(torch.int8)
        return replace(update, delta=delta, slots={**update.slots, **({SCALE: scales} if scales else {})}), {}

    def decode_update(self, update: Update) -> Update:
        delta, scales = dict(update.delta), update.slots.get(SCALE, {})
        for name, value in update.delta.items():
            scale = scales.get(name)
            if scale is None and value.is_floating_point():
                continue
            if scale is None or value.dtype != torch.int8 or scale.shape not in ((1,), value.shape[:1]):
                shape = None if scale is None else tuple(scale.shape)
                raise CompressionError(f"'{name}' is {value.dtype} {tuple(value.shape)} with a scale of shape {shape}")
            delta[name] = value.to(scale.dtype) * _along(scale, value)
        return replace(update, delta=delta, slots={slot: part for slot, part in update.slots.items() if slot != SCALE})

    def _scale(self, value: torch.Tensor) -> torch.Tensor:
        """Return the step size, (row,) or (1,)."""
        rows = value.flatten(1) if self.rows and value.ndim > 1 else value.reshape(1, -1)
        return rows.abs().amax(1) / MAX_LEVEL


def _along(scale: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return scale.view(-1, *[1] * (value.ndim - 1)) if value.ndim else scale.view(())
