"""The interfaces of data: batches, examples, and a population of clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch

from partita.core.tensors import Tensors

IGNORE_INDEX = -100  # a target that the loss ignores: padding, or a token without a label
EXAMPLE_SEEDS = "example_seeds"  # the input with a seed for each example's random draws (example,); only in training


@dataclass(frozen=True)
class Batch:
    """A batch of examples.

    Attributes:
        inputs: The model's inputs by name, each of shape (example, ...).
        targets: The targets, of shape (example, ...).
        mask: Shape (example,), zero for padding; None if all examples count.
    """

    inputs: Tensors
    targets: torch.Tensor
    mask: torch.Tensor | None = None


class Examples(Protocol):
    """Examples with access by index."""

    def __len__(self) -> int: ...

    def take(self, indices: torch.Tensor) -> Batch:
        """Return the examples at `indices`, a tensor of shape (example,), as a batch."""
        ...


@runtime_checkable
class PrefetchingExamples(Examples, Protocol):
    """Examples that are slow to read, and can be read in the background."""

    def prefetch(self, indices: torch.Tensor) -> None:
        """Start to read the examples at `indices`, which will be taken next."""
        ...


@runtime_checkable
class TableExamples(Examples, Protocol):
    """Examples that are rows of a table. Other clients' examples may be rows of the same table."""

    @property
    def table(self) -> Examples:
        """The whole table."""
        ...

    @property
    def indices(self) -> torch.Tensor:
        """The row of each example in the table, of shape (example,)."""
        ...


@runtime_checkable
class TextExamples(Examples, Protocol):
    """Examples that know the lengths of their texts, or a view of examples that may know them."""

    def lengths(self, indices: torch.Tensor) -> torch.Tensor | None:
        """Return the number of tokens of each example at `indices`, (example,); None if they are not texts."""
        ...


def text_lengths(examples: Examples, indices: torch.Tensor) -> torch.Tensor | None:
    """Return the number of tokens of each example at `indices`, (example,); None if they are not texts."""
    return examples.lengths(indices) if isinstance(examples, TextExamples) else None


@dataclass(frozen=True)
class ClientData:
    """One client's examples by split.

    Attributes:
        train: Examples for local training.
        validation: Examples held out from training; may be empty.
        test: Examples for the personalized evaluation; may be empty.
    """

    train: Examples
    validation: Examples
    test: Examples


@dataclass(frozen=True)
class NewClasses:
    """Test examples of classes that no client trains on, for models that find a class by its name.

    Attributes:
        examples: The examples. Their targets count from the first new class.
        classes: The names of the new classes.
    """

    examples: Examples
    classes: tuple[str, ...]


# What a client's model is evaluated on: the client's own test examples (None), its validation examples, or others.
EvaluateOn = Examples | NewClasses | Literal["validation"] | None


class Population(Protocol):
    """The clients by name. A client's data is created on access, so a large population costs little memory."""

    @property
    def clients(self) -> Sequence[str]:
        """The names of all clients."""
        ...

    def __getitem__(self, client: str) -> ClientData: ...
