"""The leading client dimension of a block's tensors.

A block of several clients stacks their tensors. A single client has no such dimension, so that it computes exactly what
a plain PyTorch loop computes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from partita.core.tensors import Tensors


class VmapError(ValueError):
    """`torch.vmap` does not support the model or a rule."""


@dataclass(frozen=True)
class ClientAxis:
    """Stacks, slices and splits tensors along the client dimension; does nothing for a single client.

    Attributes:
        count: The number of clients.
    """

    count: int

    @property
    def many(self) -> bool:
        """Whether tensors have a client dimension."""
        return self.count > 1

    def stack(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a new tensor with the clients' parts."""
        return torch.stack(list(parts)) if self.many else parts[0].clone()

    def leading(self, value: torch.Tensor, count: int) -> torch.Tensor:
        """Return the part of the first `count` clients of `value`, (client, ...), as a view."""
        return value[:count] if self.many else value

    def broadcast(self, numbers: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Reshape one number per client so that it multiplies each client's part of `value`.

        Args:
            numbers: Shape (client,); a scalar for a single client.
            value: Shape (client, ...); without the client dimension for a single client.

        Returns:
            Shape (client, 1, ...), with as many dimensions as `value`; a scalar for a single client.
        """
        return numbers.view(-1, *[1] * (value.ndim - 1)) if self.many else numbers

    def views(self, stacked: Tensors) -> list[Mapping[str, torch.Tensor]]:
        """Return each client's tensors. Views are created on demand."""
        return [ClientView(stacked, rank) for rank in range(self.count)] if self.many else [stacked]

    def split(self, stacked: Tensors) -> list[Tensors]:
        """Return each client's tensors as dicts of views."""
        if not self.many:
            return [stacked]
        parts = [value.unbind() for value in stacked.values()]
        return [dict(zip(stacked, row, strict=True)) for row in zip(*parts, strict=True)] or [{}] * self.count


@dataclass(frozen=True)
class ClientVmap:
    """Applies a function of one client to all clients of a block.

    Attributes:
        axis: The clients.
        what: The model and method, for messages.
        over: What the function is vmapped over, for messages.
        remedy: What a user can do if `torch.vmap` fails.
        checked: Whether failures are translated for a single client too.
    """

    axis: ClientAxis
    what: str
    over: str = "clients"
    remedy: str = "set engine.clients_per_block = 1 to train clients one by one"
    checked: bool = False

    def __call__(self, function: Callable[..., Any], dims: Sequence[Any]) -> Callable[..., Any]:
        """Return the function with a client dimension.

        Args:
            function: A function of one client.
            dims: The client dimension of each argument, as `in_dims` of `torch.vmap`.
        """
        if not self.axis.many and not self.checked:
            return function
        lifted = torch.vmap(function, in_dims=tuple(dims)) if self.axis.many else function
        return translate_errors(
            lifted,
            lambda error: VmapError(f"vmap does not support {self.what} over {self.over}: {error}; {self.remedy}"),
        )


def translate_errors(
    function: Callable[..., Any], make_error: Callable[[RuntimeError], ValueError]
) -> Callable[..., Any]:
    """Wrap `function`: any RuntimeError except out-of-memory is re-raised as the error that `make_error` returns."""

    def call(*parts: Any) -> Any:
        try:
            return function(*parts)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise make_error(error) from error

    return call


class ClientView(Mapping[str, torch.Tensor]):
    """One client's part of stacked tensors. Indexing creates a view on demand; most methods need none."""

    def __init__(self, stacked: Tensors, rank: int) -> None:
        self.stacked, self.rank = stacked, rank

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.stacked[name][self.rank]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stacked)

    def __len__(self) -> int:
        return len(self.stacked)


def stack_or_share(parts: Sequence[Any]) -> tuple[Any, Any]:
    """Stack the clients' nested dicts of tensors, except for objects that all clients share.

    Returns:
        `(value, dims)`, where `dims` has the client dimension of each value: 0 if stacked, None if shared.
    """
    first = parts[0]
    if all(_same_objects(part, first) for part in parts):
        return first, None
    if isinstance(first, Mapping):
        pairs = {name: stack_or_share([part[name] for part in parts]) for name in first}
        return {name: value for name, (value, _) in pairs.items()}, {name: dim for name, (_, dim) in pairs.items()}
    return torch.stack(list(parts)), 0


def stack_all(parts: Sequence[Any]) -> tuple[Any, Any]:
    """Stack the clients' nested dicts of tensors, also where all clients have the same object.

    For what belongs to each client: after a restart, each has a copy of its own. Results must not depend on that, and
    a shared tensor can round differently from a stacked one.

    Returns:
        `(value, dims)` as from `stack_or_share`. A single client's value stays as it is.
    """
    first = parts[0]
    if len(parts) == 1:
        return first, None
    if isinstance(first, Mapping):
        pairs = {name: stack_all([part[name] for part in parts]) for name in first}
        return {name: value for name, (value, _) in pairs.items()}, {name: dim for name, (_, dim) in pairs.items()}
    return torch.stack(list(parts)), 0


def _same_objects(left: Any, right: Any) -> bool:
    """Whether both are the same object, or dicts with the same objects as values."""
    if isinstance(left, Mapping):
        return list(left) == list(right) and all(map(operator.is_, left.values(), right.values()))
    return left is right


def leading_clients(part: tuple[Any, Any], count: int) -> tuple[Any, Any]:
    """Restrict a result of `stack_or_share` to the first `count` clients.

    Args:
        part: The `(value, dims)` of `stack_or_share`.
        count: The number of clients.

    Returns:
        `(value, dims)`, with views of the stacked tensors. Shared tensors stay as they are.
    """
    value, dims = part
    if dims is None:
        return part
    if isinstance(value, Mapping):
        return {name: leading_clients((value[name], dims[name]), count)[0] for name in value}, dims
    return value[:count], dims


def first_client(value: Any, dims: Any) -> Any:
    """Return the first client's part of nested dicts of tensors.

    Args:
        value: The tensors.
        dims: Their client dimension as `in_dims` of `torch.vmap`: 0, or None for tensors that all clients share.
    """
    if dims is None:
        return value
    if isinstance(value, Mapping):
        return {
            name: first_client(part, dims[name] if isinstance(dims, Mapping) else dims) for name, part in value.items()
        }
    return value[0]
