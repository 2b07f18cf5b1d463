"""Pruning: send only part of an update, the largest elements or the most attentive heads; the rest counts as zero."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from partita.compression import CompressionError
from partita.compression.error_feedback import ErrorFeedback
from partita.core.client_rule import ClientRule, Context
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import ATTENTION, layer_tag
from partita.core.options import PositiveShare
from partita.core.rng import Key
from partita.core.tensors import Names, Slots, Tensors
from partita.core.update import Update
from partita.core.update_transform import UpdateTransform

SHAPE, PLACES, MARKS = "prune_shape", "prune_places", "prune_marks"
ROWS, COLUMNS = "prune_rows", "prune_columns"  # masks of the heads that are sent, along dimension 0 and 1
MIN_ELEMENTS = 1024  # tensors up to this size are sent whole: the headers would cost more than pruning saves


def prune(
    by: Literal["magnitude", "heads"] = "magnitude", keep: PositiveShare = 0.5, error_feedback: bool = False
) -> Method:
    """Build pruning of updates. By magnitude it is top-k sparsification.

    Args:
        by: "magnitude" keeps the largest elements of each tensor. "heads" keeps the heads of each layer that pay most
            attention to the tokens chosen in safl, which measures it.
        keep: Fraction to send: of each tensor's elements, or of each layer's heads.
        error_feedback: Add what was not sent to the client's next update. Only by magnitude.

    Raises:
        MethodError: If `keep` is not above 0 and up to 1, or if `error_feedback` is set with heads.
    """
    if not 0 < keep <= 1:
        raise MethodError(f"method.keep is {keep}; give a fraction above 0.0 and up to 1.0")
    if by == "heads":
        if error_feedback:
            raise MethodError(
                "method.error_feedback is true with by = 'heads': heads that attention never selects are never sent, "
                "so their residual only grows; set by = 'magnitude'"
            )
        return Method("prune", client_rules=(HeadSelector(keep),), transforms=(HeadPruner(),))
    top = TopKMagnitude(keep)
    return Method("prune", transforms=(ErrorFeedback(top) if error_feedback else top,))


@dataclass(frozen=True)
class TopKMagnitude(UpdateTransform):
    """Send the elements of largest magnitude of each tensor, with their indices.

    Attributes:
        keep: The fraction of each tensor's elements to send.
    """

    keep: float

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        parts: dict[str, Tensors] = {"delta": {}, SHAPE: {}, PLACES: {}, MARKS: {}}
        for name, value in update.delta.items():
            if value.numel() <= max(MIN_ELEMENTS, self._count(value.numel())):
                parts["delta"][name] = value
                continue
            if not value.is_floating_point():
                raise MethodError(
                    "prune cannot follow a transform that turns updates into integers; compose 'prune+quantize'"
                )
            flat = value.flatten()
            places = flat.abs().topk(self._count(flat.numel())).indices.sort().values
            parts["delta"][name] = flat[places]
            parts[SHAPE][name] = torch.tensor(value.shape, dtype=torch.int32)
            slot, encoded = _encode_indices(places, flat.numel())
            parts[slot][name] = encoded
        delta = parts.pop("delta")
        slots = {**update.slots, **{slot: part for slot, part in parts.items() if part}}
        return replace(update, delta=delta, slots=slots), {}

    def decode_update(self, update: Update) -> Update:
        delta, shapes = dict(update.delta), update.slots.get(SHAPE, {})
        places, marks = update.slots.get(PLACES, {}), update.slots.get(MARKS, {})
        for name, shape in shapes.items():
            if name not in delta or (name in places) == (name in marks):
                raise CompressionError(f"'{name}' has no values, or its indices are missing or given twice")
            size, values = math.prod(shape.tolist()), delta[name]
            # Both sides know the expected count, so a forged shape cannot make the server allocate unbounded memory.
            if min(shape.tolist()) < 1 or values.shape != (self._count(size),):
                raise CompressionError(f"'{name}' has values of shape {tuple(values.shape)} for shape {shape.tolist()}")
            where = _decode_indices(places[name], size) if name in places else _decode_bitmask(marks[name], size)
            if len(where) != len(values) or not bool((where >= 0).all() and (where < size).all()):
                raise CompressionError(f"'{name}' has indices that do not fit its {size} elements")
            delta[name] = values.new_zeros(size).index_put((where.to(values.device),), values).view(shape.tolist())
        own = {SHAPE, PLACES, MARKS}
        return replace(
            update, delta=delta, slots={slot: part for slot, part in update.slots.items() if slot not in own}
        )

    def _count(self, size: int) -> int:
        return math.ceil(self.keep * size)


def _encode_indices(places: torch.Tensor, size: int) -> tuple[str, torch.Tensor]:
    """Encode indices in the smallest integer type that holds them, or as a bitmask over all elements if smaller."""
    low, kind = _kind(size)
    if len(places) * kind.itemsize <= -(-size // 8):
        return PLACES, (places + low).to(kind)
    bits = torch.zeros(-(-size // 8) * 8, dtype=torch.uint8, device=places.device)
    bits[places] = 1
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=places.device)
    return MARKS, (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def _decode_indices(encoded: torch.Tensor, size: int) -> torch.Tensor:
    low, _ = _kind(size)
    return encoded.long() - low


def _decode_bitmask(encoded: torch.Tensor, size: int) -> torch.Tensor:
    bits = encoded[:, None].bitwise_and(2 ** torch.arange(8, dtype=torch.uint8, device=encoded.device)).flatten()
    return bits.nonzero().flatten() if len(encoded) == -(-size // 8) else bits[:0]


def _kind(size: int) -> tuple[int, torch.dtype]:
    """Return the value that encodes index 0, and the dtype."""
    return (-(2**15), torch.int16) if size <= 2**16 else (0, torch.int32)


@dataclass(frozen=True)
class HeadSelector(ClientRule):
    """Choose the heads to send, for each parameter that consists of heads.

    Attributes:
        keep: The fraction of each layer's heads to send.
    """

    keep: float
    slots: Names = frozenset({ROWS, COLUMNS})
    uses_data: bool = True  # the choice of heads depends on the examples

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        parts, attention = ctx.model.head_dimensions(), ctx.notes.get(ATTENTION, {})
        if all(count == 1 for _, count in parts.values()):
            raise MethodError(f"{ctx.model.name} has one head per layer, so none can be pruned; set by = 'magnitude'")
        send: dict[str, Tensors] = {ROWS: {}, COLUMNS: {}}
        for name in sorted(parts.keys() & ctx.plan.up):
            dim, count = parts[name]
            layer = layer_tag(ctx.model.tags[name])
            if layer not in attention:
                raise MethodError(
                    "method.by = 'heads' needs the attention that safl measures; compose it as 'safl+prune' with "
                    "select = 'attention' and no noise, or set by = 'magnitude'"
                )
            if count > 1:
                send[COLUMNS if dim else ROWS][name] = self._kept(attention[layer], count)
        return {slot: part for slot, part in send.items() if part}, {}

    def _kept(self, attention: torch.Tensor, count: int) -> torch.Tensor:
        """Return the mask (head,) of heads to send. A key-value head is sent if any of the heads that share it is."""
        best = attention.topk(max(1, round(self.keep * len(attention)))).indices
        kept = torch.zeros(len(attention), dtype=torch.bool, device=attention.device)
        kept[best] = True
        return kept.view(count, -1).any(1)


@dataclass(frozen=True)
class HeadPruner(UpdateTransform):
    """Remove the pruned heads from their parameters: rows of the projections and columns of the output projection."""

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        delta = dict(update.delta)
        for dim, slot in enumerate((ROWS, COLUMNS)):
            for name, kept in update.slots.get(slot, {}).items():
                heads = delta[name].unflatten(dim, (len(kept), -1))
                delta[name] = heads.index_select(dim, kept.nonzero().flatten()).flatten(dim, dim + 1)
        return replace(update, delta=delta), {}

    def decode_update(self, update: Update) -> Update:
        delta = dict(update.delta)
        for dim, slot in enumerate((ROWS, COLUMNS)):
            for name, kept in update.slots.get(slot, {}).items():
                count = int(kept.sum())
                if name not in delta or delta[name].ndim <= dim or not count or delta[name].shape[dim] % count:
                    raise CompressionError(f"'{name}' does not consist of {count} heads")
                heads = delta[name].unflatten(dim, (count, -1))
                full = heads.new_zeros((*heads.shape[:dim], len(kept), *heads.shape[dim + 1 :]))
                delta[name] = full.index_copy(dim, kept.nonzero().flatten(), heads).flatten(dim, dim + 1)
        own = {ROWS, COLUMNS}
        return replace(
            update, delta=delta, slots={slot: part for slot, part in update.slots.items() if slot not in own}
        )
