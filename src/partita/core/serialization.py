"""Messages as safetensors, and their size in bytes by parameter name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TypeAlias

import torch

from partita.core.packed import PackedTensors, shapes
from partita.core.tensors import Tensors, byte_view

Entry = tuple[str, str, tuple[int, ...], int]  # a tensor's name, the name of its type, its shape and its bytes
Message: TypeAlias = (
    "Mapping[str, Mapping[str, torch.Tensor]]"  # slot name -> tensors by parameter name, possibly PackedTensors
)
ALIGNMENT = 64  # bytes, of tensors that torch creates on a CPU
HEADER = ""  # the name under which the header of a message is counted

# Name of a dtype of torch -> its name in the format, in the order in which safetensors writes tensors.
DTYPES = {
    "int64": "I64", "float64": "F64", "float32": "F32", "int32": "I32", "bfloat16": "BF16", "float16": "F16",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


class SerializationError(ValueError):
    """A message cannot hold a tensor of this type."""


def pack(slots: Message, about: dict[str, str] | None = None) -> bytes:
    """Serialize slots, each tensor under the key "slot/name".

    Args:
        slots: Tensors by slot and parameter name.
        about: Texts for the metadata of the file.

    Raises:
        SerializationError: If the format does not support the type of a tensor.
    """
    return save({f"{slot}/{name}": value for slot, part in slots.items() for name, value in part.items()}, about)


def read_metadata(data: bytes) -> dict[str, str]:
    """Return the metadata of a serialized message."""
    metadata: dict[str, str] = json.loads(data[8 : 8 + header_bytes(data)])["__metadata__"]
    return metadata


def save(tensors: Tensors, about: dict[str, str] | None = None) -> bytes:
    """Serialize tensors as safetensors.

    The library of that name copies the values twice, and once more if tensors share memory. Here they are copied once.

    Args:
        tensors: The tensors by name, on any device.
        about: Texts for the metadata of the file.

    Raises:
        SerializationError: If the format does not support the type of a tensor.
    """
    entries = [(name, _code(value.dtype, name), tuple(value.shape), value.nbytes) for name, value in tensors.items()]
    order = _in_file_order(entries)
    return b"".join([_header(order, about), *(byte_view(tensors[name]) for name, *_ in order)])


def header_bytes(data: bytes) -> int:
    """Return how long the header of a message says that it is. Nothing is decoded."""
    return int.from_bytes(data[:8], "little")


def load(data: bytes) -> Tensors:
    """Deserialize tensors, aligned in memory like those that torch creates.

    safetensors aligns them by chance, and some matrix products on a CPU round differently by alignment. A run that
    resumes from a file would then differ in the last bit from one that was never stopped.
    """
    import safetensors.torch  # imports torch

    found = safetensors.torch.load(data)
    return {name: value.clone() if value.data_ptr() % ALIGNMENT else value for name, value in found.items()}


def unpack(data: bytes) -> dict[str, Tensors]:
    """Deserialize the slots of a message.

    Names are sorted: the order in which safetensors returns them differs from call to call, and sums depend on it.
    """
    slots: dict[str, Tensors] = {}
    for key, value in sorted(load(data).items()):
        slot, _, name = key.partition("/")
        slots.setdefault(slot, {})[name] = value
    return slots


def byte_counts(slots: Message) -> Mapping[str, int]:
    """Return the size of `pack(slots)` in bytes by parameter name, without serializing; empty without tensors."""
    return _count(tuple((slot, tuple(part), *_forms(part)) for slot, part in slots.items()))


def total_bytes(messages: Sequence[Mapping[str, int]]) -> Counter[str]:
    """Return the sum of byte counts. Counts that are the same object are multiplied instead of added one by one."""
    kinds, times = {id(message): message for message in messages}, Counter(map(id, messages))
    weights = Counter[str]()
    for kind, message in kinds.items():
        weights.update({name: times[kind] * weight for name, weight in message.items()})
    return weights


def _forms(part: Mapping[str, torch.Tensor]) -> tuple[tuple[torch.dtype, ...], tuple[torch.Size, ...]]:
    if isinstance(part, PackedTensors):
        return (part.buffer.dtype,) * len(part), shapes(part)
    return tuple([value.dtype for value in part.values()]), shapes(part)


@lru_cache(maxsize=1024)
def _count(
    slots: tuple[tuple[str, tuple[str, ...], tuple[torch.dtype, ...], tuple[torch.Size, ...]], ...],
) -> Mapping[str, int]:
    sizes: dict[str, int] = {}
    entries: list[Entry] = []
    for slot, *tensors in slots:
        for name, kind, shape in zip(*tensors, strict=True):
            weight = shape.numel() * kind.itemsize
            sizes[name] = sizes.get(name, 0) + weight
            entries.append((f"{slot}/{name}", _code(kind, f"{slot}/{name}"), tuple(shape), weight))
    return MappingProxyType({HEADER: len(_header(_in_file_order(entries))), **sizes} if entries else {})


def _code(dtype: torch.dtype, name: str) -> str:
    code = code_of(dtype)
    if code is None:
        raise SerializationError(
            f"'{name}' is {dtype}, which messages do not support; convert it to one of {', '.join(DTYPES)} in the "
            "transform's encode"
        )
    return code


def code_of(dtype: torch.dtype) -> str | None:
    """Return the name of a dtype in a message; None if a message cannot hold it."""
    return DTYPES.get(str(dtype).removeprefix("torch."))


def _in_file_order(entries: Sequence[Entry]) -> list[Entry]:
    """Sort by type, then by name: the offsets, and so the number of digits in the header, depend on the order."""
    order = list(DTYPES.values())
    return sorted(entries, key=lambda entry: (order.index(entry[1]), entry[0]))


def _header(entries: Sequence[Entry], about: dict[str, str] | None = None) -> bytes:
    """The header of a file with these tensors, in file order: its length in 8 bytes, JSON, and spaces up to 8 bytes."""
    header: dict[str, object] = {} if about is None else {"__metadata__": about}
    start = 0
    for key, kind, shape, weight in entries:
        header[key] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, start + weight]}
        start += weight
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
