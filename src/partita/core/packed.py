"""Tensors that lie one after another in memory, a client's in a row: on a GPU one call then does for all names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # numbers, at multiples of which a tensor in a row begins: elsewhere some kernels sum in another order


class CheckedTensors(dict[str, Tensor]):
    """Tensors of which more is known than a message can claim: only code makes them."""

    finite = False  # whether all numbers are known to be
    squares: dict[str, float] | None = None  # of the norms, where they are known
    square: float | None = None  # their sum, which may be known without them


class PackedTensors(Mapping[str, Tensor]):
    """Tensors that lie one after another in a row. Each is looked up as a view of it, and most by nobody."""

    def __init__(self, buffer: Tensor, layout: PackedLayout) -> None:
        self.buffer, self.layout = buffer, layout
        self.finite = False  # as above
        self.squares: dict[str, float] | None = None
        self.square: float | None = None

    def __getitem__(self, name: str) -> Tensor:
        shape, stride, start = self.layout.places[name]
        return self.buffer.as_strided(shape, stride, self.buffer.storage_offset() + start)

    def __contains__(self, name: object) -> bool:
        return name in self.layout.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.names)

    def __len__(self) -> int:
        return len(self.layout.names)


def mark_finite(tensors: Mapping[str, Tensor], finite: bool) -> CheckedTensors | PackedTensors:
    made = tensors if isinstance(tensors, CheckedTensors | PackedTensors) else CheckedTensors(tensors)
    made.finite = finite
    return made


def shapes(tensors: Mapping[str, Tensor]) -> tuple[torch.Size, ...]:
    return (
        tensors.layout.shapes
        if isinstance(tensors, PackedTensors)
        else tuple([value.shape for value in tensors.values()])
    )


class PackedLayout:
    """Where tensors of these names and shapes lie in a row. There is one object for all rows that are alike."""

    def __init__(self, names: tuple[str, ...], shapes: tuple[torch.Size, ...]) -> None:
        self.names, self.shapes = names, shapes
        self.places: dict[str, tuple[torch.Size, tuple[int, ...], int]] = {}  # shape, stride and where it begins
        self.sizes: list[int] = []  # of tensors, and of gaps where they are needed
        self.gaps: list[int] = []  # which of them are gaps
        for name, shape in zip(names, shapes, strict=True):
            self.places[name] = shape, torch.empty(shape, device="meta").stride(), sum(self.sizes)
            self.sizes.append(shape.numel())
            if gap := -shape.numel() % ALIGNMENT:
                self.gaps.append(len(self.sizes))
                self.sizes.append(gap)

    def __reduce__(self) -> Any:
        return layout_for, (self.names, self.shapes)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """(client, number) of tensors (client, ...)."""
        parts = [value.reshape(len(value), -1) for value in tensors]
        for place in self.gaps:
            parts.insert(place, tensors[0].new_zeros(len(tensors[0]), self.sizes[place]))
        return torch.cat(parts, 1)

    def per_client(self, rows: Tensor) -> list[PackedTensors]:
        """(client, number) as the tensors of each client."""
        return [PackedTensors(buffer, self) for buffer in rows.unbind()]

    def per_name(self, rows: Tensor) -> dict[str, Tensor]:
        """(client, number) as one such table for each name."""
        pieces = list(rows.split_with_sizes(self.sizes, -1))
        for place in reversed(self.gaps):
            del pieces[place]
        return dict(zip(self.names, pieces, strict=True))


@lru_cache(maxsize=64)
def layout_for(names: tuple[str, ...], shapes: tuple[torch.Size, ...]) -> PackedLayout:
    return PackedLayout(names, shapes)
