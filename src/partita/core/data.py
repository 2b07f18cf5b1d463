"""What the core asks of data: batches, examples, and a population of clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from partita.core.tensors import Tensors

IGNORE_INDEX = -100  # a target that does not count: padding, or a token of which nothing is asked


@dataclass(frozen=True)
class Batch:
    """Inputs by name, as the model takes them. The mask (example,) is zero for padding; None: all count."""

    inputs: Tensors
    targets: Tensor
    mask: Tensor | None = None


class Examples(Protocol):
    """A set of examples that can be taken by index."""

    def __len__(self) -> int: ...

    def take(self, indices: Tensor) -> Batch: ...


@runtime_checkable
class TableExamples(Examples, Protocol):
    """Examples that are rows of a table, which may hold those of others too."""

    @property
    def table(self) -> Examples: ...

    @property
    def indices(self) -> Tensor: ...


@dataclass(frozen=True)
class ClientData:
    train: Examples
    validation: Examples
    test: Examples


class Population(Protocol):
    """The clients by name; a client's data is made when asked for, so a large population costs little."""

    @property
    def clients(self) -> Sequence[str]: ...

    def __getitem__(self, client: str) -> ClientData: ...
