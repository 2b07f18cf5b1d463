"""Arithmetic on named tensors: every payload is a dict from parameter name to tensor."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from partita.core.packed import Known, Laid

Tensors = dict[str, Tensor]
Slots = Mapping[str, Tensors]  # slot name -> tensors by parameter name
Names = frozenset[str]


def select(tree: Mapping[str, Tensor], names: Iterable[str]) -> Tensors:
    """The named part, in sorted order, so that no later sum depends on the order of a set."""
    return {name: tree[name] for name in sorted(names)}


def within(slots: Slots, names: Names) -> dict[str, Tensors]:
    """Every slot restricted to the names; a slot may hold fewer of them."""
    return {slot: select(tree, names & tree.keys()) for slot, tree in slots.items()}


def add(left: Tensors, right: Mapping[str, Tensor]) -> Tensors:
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
    return value if value.dtype == torch.float32 else value.to(torch.promote_types(value.dtype, torch.float32))


def scale(tree: Mapping[str, Tensor], factor: float | Tensor) -> Tensors:
    return {name: value * factor for name, value in tree.items()}


def zeros_like(tree: Tensors) -> Tensors:
    return {name: torch.zeros_like(value) for name, value in tree.items()}


def norm(tree: Tensors) -> Tensor:
    """The Euclidean norm over all tensors together, by the norms of each as torch's clipping takes it."""
    if not tree:
        return torch.zeros(())
    total: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(value) for value in tree.values()]))
    return total


def largest(tree: Mapping[str, Tensor]) -> Tensor:
    """The size of the largest number in any of the tensors, itself not finite where one of them is not."""
    return torch.stack(torch._foreach_norm(list(tree.values()), ord=math.inf)).max()


def finite(tree: Mapping[str, Tensor]) -> bool:
    """Whether all numbers are; looked up once for all tensors, since on a GPU every look waits for it."""
    return (isinstance(tree, Known | Laid) and tree.finite) or not tree or math.isfinite(largest(tree).item())


def squares(tree: Mapping[str, Tensor]) -> dict[str, float]:
    """The square of each tensor's norm, in float64."""
    if isinstance(tree, Known | Laid) and tree.squares is not None:
        return tree.squares
    if not tree:
        return {}
    norms = torch.stack(torch._foreach_norm(list(tree.values()), dtype=torch.float64))
    return dict(zip(tree, norms.square().tolist(), strict=True))


def to(tree: Mapping[str, Tensor], device: torch.device) -> Tensors:
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
        self.weight: dict[str, float] = {}
        self.laid: Laid | None = None  # as long as all that was added lay in rows of one form
        self.by_name: Tensors = {}  # else

    @property
    def value(self) -> Tensors:
        return self.by_name if self.laid is None else dict(self.laid)

    def add(self, tree: Mapping[str, Tensor], weight: float) -> None:
        if isinstance(tree, Laid) and not self.weight:
            self.laid = Laid(wide(tree.row.clone()), tree.form)
            self.weight = dict.fromkeys(tree, weight)
        elif isinstance(tree, Laid) and self.laid is not None and self.laid.form is tree.form:
            total = next(iter(self.weight.values())) + weight
            self.weight = dict.fromkeys(tree, total)
            if total > 0:
                self.laid.row.lerp_(tree.row.to(self.laid.row.dtype), weight / total)
        else:
            self._add_by_name(tree, weight)

    def _add_by_name(self, tree: Mapping[str, Tensor], weight: float) -> None:
        self.by_name, self.laid = self.value, None  # from here on, names may differ in weight
        totals = {name: self.weight.get(name, 0.0) + weight for name in tree}
        self.weight |= totals
        known = [name for name in tree if name in self.by_name and totals[name] > 0]
        for name, value in copies({name: tree[name] for name in tree if name not in self.by_name}).items():
            self.by_name[name] = wide(value)
        if known:
            means, values = [self.by_name[name] for name in known], [tree[name] for name in known]
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
