"""What a message weighs: named tensors as safetensors, counted by parameter name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import safetensors.torch
import torch
from torch import Tensor

from partita.core.packed import PackedTensors, shapes
from partita.core.tensors import Tensors

Message = Mapping[str, Mapping[str, Tensor]]  # slot name -> tensors by parameter name, which may lie in a row
HEADER = ""  # the name under which a message's own header is counted

# In the order in which safetensors lays tensors out.
DTYPES = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class SerializationError(ValueError):
    """A tensor that a message cannot hold."""


def pack(slots: Message, about: dict[str, str] | None = None) -> bytes:
    """Every tensor under "slot/name"."""
    return save({f"{slot}/{name}": value for slot, part in slots.items() for name, value in part.items()}, about)


def read_metadata(data: bytes) -> dict[str, str]:
    """What was packed beside the tensors."""
    length = int.from_bytes(data[:8], "little")
    found: dict[str, str] = json.loads(data[8 : 8 + length])["__metadata__"]
    return found


def save(tensors: Tensors, about: dict[str, str] | None = None) -> bytes:
    """As safetensors, which wants every tensor to have its memory to itself: one that comes twice is copied."""
    apart: Tensors = {}
    taken: set[int] = set()
    for name, value in tensors.items():
        _code(value.dtype, name)
        whole = value.detach().cpu().contiguous()
        apart[name] = whole.clone() if whole.untyped_storage().data_ptr() in taken else whole
        taken.add(apart[name].untyped_storage().data_ptr())
    return safetensors.torch.save(apart, about)


def unpack(data: bytes) -> dict[str, Tensors]:
    """Sorted by name: safetensors has an order that differs from call to call, and sums would depend on it."""
    slots: dict[str, Tensors] = {}
    for key, value in sorted(safetensors.torch.load(data).items()):
        slot, _, name = key.partition("/")
        slots.setdefault(slot, {})[name] = value
    return slots


def byte_counts(slots: Message) -> Mapping[str, int]:
    """The bytes of pack(slots) by parameter name, without making a copy of anything; no tensors, no message."""
    return _count(tuple((slot, tuple(part), *_forms(part)) for slot, part in slots.items()))


def total_bytes(messages: Sequence[Mapping[str, int]]) -> Counter[str]:
    """What they weigh together. Messages of one kind are counted as one object, and so multiplied, not summed up."""
    kinds, times = {id(each): each for each in messages}, Counter(map(id, messages))
    weights = Counter[str]()
    for kind, message in kinds.items():
        weights.update({name: times[kind] * weight for name, weight in message.items()})
    return weights


def _forms(part: Mapping[str, Tensor]) -> tuple[tuple[torch.dtype, ...], tuple[torch.Size, ...]]:
    if isinstance(part, PackedTensors):
        return (part.buffer.dtype,) * len(part), shapes(part)
    return tuple([value.dtype for value in part.values()]), shapes(part)


@lru_cache(maxsize=1024)
def _count(
    slots: tuple[tuple[str, tuple[str, ...], tuple[torch.dtype, ...], tuple[torch.Size, ...]], ...],
) -> Mapping[str, int]:
    sizes: dict[str, int] = {}
    entries: list[tuple[str, str, tuple[int, ...], int]] = []
    for slot, *tensors in slots:
        for name, kind, shape in zip(*tensors, strict=True):
            weight = shape.numel() * kind.itemsize
            sizes[name] = sizes.get(name, 0) + weight
            entries.append((f"{slot}/{name}", _code(kind, f"{slot}/{name}"), tuple(shape), weight))
    return MappingProxyType({HEADER: _envelope(entries), **sizes} if entries else {})


def _code(dtype: torch.dtype, name: str) -> str:
    """The name that safetensors has for the dtype."""
    if dtype not in DTYPES:
        able = ", ".join(str(each).removeprefix("torch.") for each in DTYPES)
        raise SerializationError(
            f"'{name}' is {dtype}, which messages cannot hold; convert it to one of {able} in the transform's encode"
        )
    return DTYPES[dtype]


def _envelope(entries: Sequence[tuple[str, str, tuple[int, ...], int]]) -> int:
    """The header that safetensors writes: its length in 8 bytes, then JSON padded to a multiple of 8."""
    start, header = 0, {}
    # By type, then by name: offsets, and so the digits in the header, depend on the order.
    order = list(DTYPES.values())
    for key, kind, shape, weight in sorted(entries, key=lambda entry: (order.index(entry[1]), entry[0])):
        header[key] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, start + weight]}
        start += weight
    length = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + -(-length // 8) * 8
