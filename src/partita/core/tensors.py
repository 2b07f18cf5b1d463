"""Arithmetic on named tensors: dicts from parameter name to tensor.

Functions use `foreach_*` where they can: on a GPU, launching a kernel per name costs more than the arithmetic.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import torch

from partita.core import torch_private
from partita.core.packed import PackedTensors

Tensors: TypeAlias = "dict[str, torch.Tensor]"
Slots = Mapping[str, Tensors]  # slot name -> tensors by parameter name
Names = frozenset[str]


def select(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> Tensors:
    """Return the tensors of `names`, sorted by name, so that no later sum depends on the order of a set."""
    return {name: tensors[name] for name in sorted(names)}


def restrict_slots(slots: Slots, names: Names) -> dict[str, Tensors]:
    """Return every slot restricted to `names`. A slot may lack some of them."""
    return {slot: select(tensors, names & tensors.keys()) for slot, tensors in slots.items()}


def add(left: Tensors, right: Mapping[str, torch.Tensor]) -> Tensors:
    """Return left + right for the names in `right`; all other tensors of `left` are returned as the same objects."""
    names = [name for name in left if name in right]
    if not names:
        return dict(left)
    sums = torch_private.foreach_add([left[name] for name in names], [right[name] for name in names])
    return {**left, **dict(zip(names, sums, strict=True))}


def subtract(left: Tensors, right: Tensors) -> Tensors:
    """Return left - right for the names in `left`, all of which must be in `right`."""
    if not left:
        return {}
    return dict(zip(left, torch_private.foreach_sub(list(left.values()), [right[name] for name in left]), strict=True))


def clone_all(tensors: Tensors) -> Tensors:
    """Return a copy of every tensor."""
    copies = {name: torch.empty_like(value) for name, value in tensors.items()}
    if copies:
        torch_private.foreach_copy_(list(copies.values()), list(tensors.values()))
    return copies


def clone_views(tensors: Tensors) -> Tensors:
    """Return the tensors with each view replaced by a copy. A view would keep its whole storage alive."""
    return {name: value.clone() if torch_private.is_view(value) else value for name, value in tensors.items()}


def upcast(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor in float32 or higher precision: in half precision, small terms vanish in a long sum."""
    return value if value.dtype == torch.float32 else value.to(torch.promote_types(value.dtype, torch.float32))


def scale(tensors: Mapping[str, torch.Tensor], factor: float | torch.Tensor) -> Tensors:
    """Return every tensor times `factor`."""
    return {name: value * factor for name, value in tensors.items()}


def zeros_like(tensors: Tensors) -> Tensors:
    """Return zeros for every tensor."""
    return {name: torch.zeros_like(value) for name, value in tensors.items()}


def norm(tensors: Tensors) -> torch.Tensor:
    """Return the Euclidean norm over all tensors, computed from the norm of each as in torch's gradient clipping."""
    if not tensors:
        return torch.zeros(())
    total: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(value) for value in tensors.values()])
    )
    return total


def max_abs(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the largest absolute value in all tensors; it is not finite if any value is not finite."""
    return torch.stack(torch_private.foreach_norm(list(tensors.values()), ord=math.inf)).max()


def all_finite(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether all values are finite. Synchronizes with the GPU once for all tensors."""
    return not tensors or math.isfinite(max_abs(tensors).item())


def squared_norms(tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return each tensor's squared norm, computed in float64."""
    if not tensors:
        return {}
    norms = torch.stack(torch_private.foreach_norm(list(tensors.values()), dtype=torch.float64))
    return dict(zip(tensors, norms.square().tolist(), strict=True))


def exact_sum(values: Iterable[float]) -> float:
    """Return the sum, rounded once; infinity if the sum of finite values overflows float64."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def to(tensors: Mapping[str, torch.Tensor], device: torch.device) -> Tensors:
    """Return every tensor on `device`."""
    return {name: value.to(device, non_blocking=True) for name, value in tensors.items()}


def equal(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Whether names, types, shapes and bits are equal: -0.0 differs from 0.0."""
    return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether type, shape and bits of two tensors are equal."""
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(_bits(left), _bits(right))


def all_zero(value: torch.Tensor) -> bool:
    """Whether all bits are zero: -0.0 is not zero."""
    bits = _bits(value)
    return not bits[:64].any() and not bits.any()  # most tensors differ from zero at their start


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.detach().contiguous().flatten().view(torch.uint8)


def byte_view(value: torch.Tensor) -> memoryview:
    """Return the bits of a tensor. They are copied only if they are on another device or not contiguous."""
    return _bits(value.cpu()).numpy().data


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a hash of names, types, shapes and bits."""
    state = hashlib.blake2b(digest_size=16)
    for name, value in sorted(tensors.items()):
        state.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        state.update(byte_view(value))
    return state.hexdigest()


def sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a SHA-256 of names, types, shapes and the SHA-256 of each tensor's bits.

    Tensors are not copied. Each has a digest of its own, so that several threads can share the work.
    """
    named = sorted(tensors.items())
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        digests = threads.map(lambda item: hashlib.sha256(byte_view(item[1])).hexdigest(), named)
        lines = [
            f"{name}|{value.dtype}|{tuple(value.shape)}|{digest}\n"
            for (name, value), digest in zip(named, digests, strict=True)
        ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class Mean:
    """A running weighted mean by name.

    Holds one copy of the tensors, however many are added. The mean of a single addition is exact.

    Attributes:
        weight: The total weight by name.
        packed: The mean as one buffer, as long as everything added was packed with the same layout.
        by_name: Otherwise, the mean by name.
    """

    def __init__(self) -> None:
        self.weight: dict[str, float] = {}
        self.packed: PackedTensors | None = None
        self.by_name: Tensors = {}

    @property
    def value(self) -> Tensors:
        """The mean of each name over the additions that had it."""
        return self.by_name if self.packed is None else dict(self.packed)

    def add(self, tensors: Mapping[str, torch.Tensor], weight: float) -> None:
        """Add tensors with a weight. Names may differ between additions."""
        if isinstance(tensors, PackedTensors) and not self.weight:
            self.packed = PackedTensors(upcast(tensors.buffer.clone()), tensors.layout)
            self.weight = dict.fromkeys(tensors, weight)
        elif isinstance(tensors, PackedTensors) and self.packed is not None and self.packed.layout is tensors.layout:
            total = next(iter(self.weight.values())) + weight
            self.weight = dict.fromkeys(tensors, total)
            if total > 0:
                self.packed.buffer.lerp_(tensors.buffer.to(self.packed.buffer.dtype), weight / total)
        else:
            self._add_by_name(tensors, weight)

    def _add_by_name(self, tensors: Mapping[str, torch.Tensor], weight: float) -> None:
        self.by_name, self.packed = self.value, None  # from here on, names may differ in weight
        totals = {name: self.weight.get(name, 0.0) + weight for name in tensors}
        self.weight |= totals
        known = [name for name in tensors if name in self.by_name and totals[name] > 0]
        for name, value in clone_all({name: tensors[name] for name in tensors if name not in self.by_name}).items():
            self.by_name[name] = upcast(value)
        if known:
            means, values = [self.by_name[name] for name in known], [tensors[name] for name in known]
            together = {totals[name] for name in known}
            if len(together) == 1 and len({value.dtype for value in (*means, *values)}) == 1:
                torch_private.foreach_lerp_(means, values, weight / together.pop())
            else:
                steps = torch_private.foreach_sub(values, means)
                torch_private.foreach_mul_(steps, [weight / totals[name] for name in known])
                torch_private.foreach_add_(means, steps)

    def over(self, total: float) -> Tensors:
        """Return the weighted sum divided by `total`, which may include the weight of additions without a name."""
        return {name: value * (self.weight[name] / total) for name, value in self.value.items()}


def constants(numbers: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Return numbers as a tensor (number,) with the dtype and device of `like`, without a copy from the host.

    A CUDA graph cannot capture such a copy.
    """
    return torch.stack([like.new_full((), number) for number in numbers])
