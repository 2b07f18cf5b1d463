"""Arithmetic on named tensors: every payload is a dict from parameter name to tensor."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Slots = Mapping[str, Tensors]  # slot name -> tensors by parameter name
Names = frozenset[str]

ALIGNED = 16  # numbers, at multiples of which a tensor in a row begins: elsewhere some kernels sum in another order


class Known(dict[str, Tensor]):
    """Tensors of which more is known than a message can claim: only code makes them."""

    finite = False  # whether all numbers are known to be


class Laid(Known):
    """Tensors that lie one after another in a row, so that one call does for all names."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], row: Tensor, form: Form) -> None:
        super().__init__(tensors)
        self.row, self.form = row, form

    def __setitem__(self, name: str, value: Tensor) -> None:
        raise TypeError(f"'{name}' lies in a row with others and cannot be set by itself; change a dict of them")

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"'{name}' lies in a row with others and cannot be taken out; change a dict of them")

    def __reduce__(self) -> Any:
        """Between processes the row goes, and not each of its parts."""
        return _laid, (self.row, self.form, self.finite)


def _laid(row: Tensor, form: Form, finite: bool) -> Laid:
    laid = form.of(row)
    laid.finite = finite
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
        return form, (self.names, self.shapes)

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
def form(names: tuple[str, ...], shapes: tuple[torch.Size, ...]) -> Form:
    return Form(names, shapes)


def select(tree: Mapping[str, Tensor], names: Iterable[str]) -> Tensors:
    """The named part, in sorted order, so that no later sum depends on the order of a set."""
    return {name: tree[name] for name in sorted(names)}


def within(slots: Slots, names: Names) -> dict[str, Tensors]:
    """Every slot restricted to the names; a slot may hold fewer of them."""
    return {slot: select(tree, names & tree.keys()) for slot, tree in slots.items()}


def add(left: Tensors, right: Tensors) -> Tensors:
    """left + right where right has the name; what right lacks is handed on as the same object.

    All names in one call: on a GPU each call costs more than the arithmetic.
    """
    names = [name for name in left if name in right]
    if not names:
        return dict(left)
    sums = torch._foreach_add([left[name] for name in names], [right[name] for name in names])
    return {**left, **dict(zip(names, sums, strict=True))}


def subtract(left: Tensors, right: Tensors) -> Tensors:
    """Also in one call."""
    if not left:
        return {}
    return dict(zip(left, torch._foreach_sub(list(left.values()), [right[name] for name in left]), strict=True))


def copies(tree: Tensors) -> Tensors:
    """Also in one call."""
    places = {name: torch.empty_like(value) for name, value in tree.items()}
    if places:
        torch._foreach_copy_(list(places.values()), list(tree.values()))
    return places


def own(tree: Tensors) -> Tensors:
    """Without views, which would hold on to all that they are a part of."""
    return {name: value.clone() if value._is_view() else value for name, value in tree.items()}


def wide(value: Tensor) -> Tensor:
    """In float32 at least: a long sum in half precision stops moving."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def scale(tree: Tensors, factor: float | Tensor) -> Tensors:
    return {name: value * factor for name, value in tree.items()}


def zeros_like(tree: Tensors) -> Tensors:
    return {name: torch.zeros_like(value) for name, value in tree.items()}


def norm(tree: Tensors) -> Tensor:
    """The Euclidean norm over all tensors together, by the norms of each as torch's clipping takes it."""
    if not tree:
        return torch.zeros(())
    total: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(value) for value in tree.values()]))
    return total


def largest(tree: Tensors) -> Tensor:
    """The size of the largest number in any of the tensors, itself not finite where one of them is not."""
    return torch.stack(torch._foreach_norm(list(tree.values()), ord=math.inf)).max()


def finite(tree: Tensors) -> bool:
    """Whether all numbers are; looked up once for all tensors, since on a GPU every look waits for it."""
    return (isinstance(tree, Known) and tree.finite) or not tree or math.isfinite(largest(tree).item())


def squares(tree: Tensors) -> dict[str, float]:
    """The square of each tensor's norm, in float64."""
    if not tree:
        return {}
    norms = torch.stack(torch._foreach_norm(list(tree.values()), dtype=torch.float64))
    return dict(zip(tree, norms.square().tolist(), strict=True))


def to(tree: Tensors, device: torch.device) -> Tensors:
    return {name: value.to(device, non_blocking=True) for name, value in tree.items()}


def equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Bit for bit: the same types, and -0.0 is not 0.0."""
    return left.keys() == right.keys() and all(_same(left[name], right[name]) for name in left)


def _same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(_bits(left), _bits(right))


def _bits(value: Tensor) -> Tensor:
    return value.detach().contiguous().flatten().view(torch.uint8)


def digest(tree: Mapping[str, Tensor]) -> str:
    """A fingerprint of names, types, shapes and bits."""
    state = hashlib.blake2b(digest_size=16)
    for name, value in sorted(tree.items()):
        state.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        state.update(_bits(value.cpu()).numpy().tobytes())
    return state.hexdigest()


class Mean:
    """A running weighted mean by name: one copy of the model however many are added, and the first is exact."""

    def __init__(self) -> None:
        self.value: Tensors = {}
        self.weight: dict[str, float] = {}

    def add(self, tree: Tensors, weight: float) -> None:
        mine = self.value
        if isinstance(tree, Laid) and not mine:
            self.value, self.weight = tree.form.of(wide(tree.row.clone())), dict.fromkeys(tree, weight)
        elif isinstance(tree, Laid) and isinstance(mine, Laid) and mine.form is tree.form:
            total = next(iter(self.weight.values())) + weight
            self.weight = dict.fromkeys(tree, total)
            if total > 0:
                mine.row.lerp_(tree.row.to(mine.row.dtype), weight / total)
        else:
            self._add_by_name(tree, weight)

    def _add_by_name(self, tree: Tensors, weight: float) -> None:
        self.value = dict(self.value)  # from here on, names may differ in weight
        totals = {name: self.weight.get(name, 0.0) + weight for name in tree}
        self.weight |= totals
        known = [name for name in tree if name in self.value and totals[name] > 0]
        for name, value in copies({name: tree[name] for name in tree if name not in self.value}).items():
            self.value[name] = wide(value)
        if known:
            means, values = [self.value[name] for name in known], [tree[name] for name in known]
            together = {totals[name] for name in known}
            if len(together) == 1 and len({value.dtype for value in (*means, *values)}) == 1:
                torch._foreach_lerp_(means, values, weight / together.pop())
            else:
                steps = torch._foreach_sub(values, means)
                torch._foreach_mul_(steps, [weight / totals[name] for name in known])
                torch._foreach_add_(means, steps)

    def over(self, total: float) -> Tensors:
        """The weighted sum divided by a total that also counts those who did not add a name."""
        return {name: value * (self.weight[name] / total) for name, value in self.value.items()}
