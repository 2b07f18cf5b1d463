"""Named tensors packed into one contiguous buffer per client, so that one GPU call serves all names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

# Tensors start at multiples of this many elements: at other offsets some kernels sum in a different order.
ALIGNMENT = 16


class PackedTensors(Mapping[str, "torch.Tensor"]):
    """Named tensors packed into one contiguous buffer. Indexing by name creates a view on demand."""

    def __init__(self, buffer: torch.Tensor, layout: PackedLayout) -> None:
        self.buffer, self.layout = buffer, layout

    def __getitem__(self, name: str) -> torch.Tensor:
        shape, stride, start = self.layout.places[name]
        return self.buffer.as_strided(shape, stride, self.buffer.storage_offset() + start)

    def __contains__(self, name: object) -> bool:
        return name in self.layout.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.names)

    def __len__(self) -> int:
        return len(self.layout.names)


def shapes(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Size, ...]:
    """Return the shapes in the order of names, without creating views of packed tensors."""
    return (
        tensors.layout.shapes
        if isinstance(tensors, PackedTensors)
        else tuple([value.shape for value in tensors.values()])
    )


class PackedLayout:
    """Where tensors of given names and shapes are in a buffer.

    Create it with `layout_for`, so that equal layouts are the same object.
    """

    def __init__(self, names: tuple[str, ...], shapes: tuple[torch.Size, ...]) -> None:
        self.names, self.shapes = names, shapes
        self.places: dict[str, tuple[torch.Size, tuple[int, ...], int]] = {}  # shape, stride and offset
        self.sizes: list[int] = []  # sizes of tensors and of the gaps between them
        self.gaps: list[int] = []  # indices of the gaps in `sizes`
        for name, shape in zip(names, shapes, strict=True):
            self.places[name] = shape, torch.empty(shape, device="meta").stride(), sum(self.sizes)
            self.sizes.append(shape.numel())
            if gap := -shape.numel() % ALIGNMENT:
                self.gaps.append(len(self.sizes))
                self.sizes.append(gap)

    def __reduce__(self) -> Any:
        return layout_for, (self.names, self.shapes)

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Pack tensors of shape (client, ...) and return them as rows of shape (client, element).

        Args:
            tensors: One tensor for each name of the layout, in its order.
        """
        parts = [value.reshape(len(value), -1) for value in tensors]
        for place in self.gaps:
            parts.insert(place, tensors[0].new_zeros(len(tensors[0]), self.sizes[place]))
        return torch.cat(parts, 1)

    def per_client(self, rows: torch.Tensor) -> list[PackedTensors]:
        """Split rows (client, element) and return the packed tensors of each client, as views."""
        return [PackedTensors(buffer, self) for buffer in rows.unbind()]

    def per_name(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split rows (client, element) and return one table (client, element) per name, as views."""
        pieces = list(rows.split_with_sizes(self.sizes, -1))
        for place in reversed(self.gaps):
            del pieces[place]
        return dict(zip(self.names, pieces, strict=True))


@lru_cache(maxsize=64)
def layout_for(names: tuple[str, ...], shapes: tuple[torch.Size, ...]) -> PackedLayout:
    """Return the layout of these names and shapes; the same object for equal arguments."""
    return PackedLayout(names, shapes)
