"""Tensors that lie one after another in memory, a client's in a row: on a GPU one call then does for all names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor

ALIGNED = 16  # numbers, at multiples of which a tensor in a row begins: elsewhere some kernels sum in another order


class Known(dict[str, Tensor]):
    """Tensors of which more is known than a message can claim: only code makes them."""

    finite = False  # whether all numbers are known to be


class Laid(Known):
    """Tensors that lie one after another in a row, so that one call does for all names."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], row: Tensor, form: Form) -> None:
        super().__init__(tensors)
        self.row, self.form = row, form
        self.squares: dict[str, float] | None = None  # of the norms, where they are known

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("tensors that lie in a row are not changed one by one; make a dict of them first")

    __setitem__ = __delitem__ = __ior__ = pop = popitem = clear = update = setdefault = _refuse

    def __reduce__(self) -> Any:
        """Between processes the row goes, and not each of its parts."""
        return _laid, (self.row, self.form, self.finite, self.squares)


def _laid(row: Tensor, form: Form, finite: bool, squares: dict[str, float] | None) -> Laid:
    laid = form.of(row)
    laid.finite, laid.squares = finite, squares
    return laid


def known(tensors: Mapping[str, Tensor], finite: bool) -> Known:
    made = tensors if isinstance(tensors, Known) else Known(tensors)
    made.finite = finite
    return made


class Form:
    """Where tensors of these names and shapes lie in a row. There is one object for all rows that are alike."""

    def __init__(self, names: tuple[str, ...], shapes: tuple[torch.Size, ...]) -> None:
        self.names, self.shapes = names, shapes
        self.sizes: list[int] = []  # of tensors, and of gaps where they are needed
        self.gaps: list[int] = []  # which of them are gaps
        for size in (shape.numel() for shape in shapes):
            self.sizes.append(size)
            if gap := -size % ALIGNED:
                self.gaps.append(len(self.sizes))
                self.sizes.append(gap)

    def __reduce__(self) -> Any:
        return form_of, (self.names, self.shapes)

    def lay(self, tensors: Sequence[Tensor]) -> Tensor:
        """(client, number) of tensors (client, ...)."""
        parts = [value.reshape(len(value), -1) for value in tensors]
        for place in self.gaps:
            parts.insert(place, tensors[0].new_zeros(len(tensors[0]), self.sizes[place]))
        return torch.cat(parts, 1)

    def of(self, row: Tensor) -> Laid:
        """The tensors of a row, as views of it."""
        pieces = zip(self.names, self._apart(row), self.shapes, strict=True)
        return Laid([(name, piece.view(shape)) for name, piece, shape in pieces], row, self)

    def each(self, rows: Tensor) -> list[Laid]:
        """The same for every row."""
        count, pieces = len(rows), zip(self._apart(rows), self.shapes, strict=True)
        columns = [piece.view(count, *shape).unbind() for piece, shape in pieces]
        return [
            Laid(zip(self.names, column, strict=True), row, self)
            for *column, row in zip(*columns, rows.unbind(), strict=True)
        ]

    def _apart(self, rows: Tensor) -> list[Tensor]:
        pieces = list(rows.split_with_sizes(self.sizes, -1))
        for place in reversed(self.gaps):
            del pieces[place]
        return pieces


@lru_cache(maxsize=64)
def form_of(names: tuple[str, ...], shapes: tuple[torch.Size, ...]) -> Form:
    return Form(names, shapes)
