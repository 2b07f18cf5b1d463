"""A task is a table of examples with a central test set; a federation deals its rows to clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import floor
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partita.core.data import Batch, ClientData, Examples
from partita.core.options import Range
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.data.client_ids import NamedClients
from partita.data.errors import DataError
from partita.data.ragged import RaggedExamples

Ints = NDArray[np.int64]
Side = Annotated[int, Range(low=1, high=2**16)]  # of an image, in pixels
Parts = tuple[Tensor, Tensor, Tensor]  # the rows of a client's train, validation and test part


@dataclass(frozen=True, eq=False)
class Table:
    """Examples in memory. The transform is applied to what is taken, so images can be held as bytes."""

    inputs: Tensors
    targets: Tensor
    transform: Callable[[Tensors], Tensors] | None = None

    def __post_init__(self) -> None:
        for name, value in self.inputs.items():
            if len(value) != len(self.targets):
                raise DataError(f"input '{name}' has {len(value)} rows, but there are {len(self.targets)} targets")

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: Tensor) -> Batch:
        indices = indices.to(self.targets.device, non_blocking=True)
        inputs = {name: value.index_select(0, indices) for name, value in self.inputs.items()}
        if self.transform is not None:
            inputs = self.transform(inputs)
        return Batch(inputs, self.targets.index_select(0, indices))

    def to(self, device: torch.device) -> Table:
        """The table there, if it takes no more than half of the memory that is free, and as it is otherwise."""
        if self.targets.device == device:
            return self
        tensors = (*self.inputs.values(), self.targets)
        wanted = sum(value.numel() * value.element_size() for value in tensors)
        if device.type == "cuda" and wanted > torch.cuda.mem_get_info(device)[0] // 2:
            return self
        inputs = {name: value.to(device) for name, value in self.inputs.items()}
        return Table(inputs, self.targets.to(device), self.transform)


@dataclass(frozen=True, eq=False)
class Subset:
    """Some rows of a table, held as their indices alone."""

    table: Table | RaggedExamples
    indices: Tensor  # (row,)

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, indices: Tensor) -> Batch:
        return self.table.take(self.indices[indices])


@dataclass(frozen=True, eq=False)
class Task:
    """What is to be learnt. `columns` holds one value for each train row, for splits that follow them.

    `kind` says what goes in and what is asked: the class of an image or a text, or with `multi_label` any number of
    classes; the tag of each token; or the next token, where there are no classes.
    """

    name: str
    train: Table | RaggedExamples
    test: Table | RaggedExamples
    classes: tuple[str, ...]
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    channels: int = 0  # of images; 0 for other inputs
    size: int = 0  # of square images; 0 for other inputs
    kind: Literal["image", "text", "tokens", "lm"] = "image"
    multi_label: bool = False
    words: int = 0  # a vocabulary of so many holds every token; 0 where there are none

    def __post_init__(self) -> None:
        for name, values in self.columns.items():
            if len(values) != len(self.train):
                raise DataError(f"column '{name}' has {len(values)} values for {len(self.train)} train rows")

    def labels(self) -> Ints:
        """The class of each train row, for tasks that have one."""
        targets = self.train.targets
        if targets.ndim != 1 or targets.is_floating_point() or self.kind in ("tokens", "lm"):
            raise DataError(
                f"{self.name} has targets of shape {tuple(targets.shape)} and type {targets.dtype}, but this split "
                "needs one class for each example; use 'iid', 'quantity' or 'by_column'"
            )
        return targets.numpy().astype(np.int64)


@dataclass(frozen=True, eq=False)
class Partition:
    """Which rows are whose: client i has rows[offsets[i]:offsets[i + 1]]."""

    rows: Ints  # (row,)
    offsets: Ints  # (client + 1,)
    clients: Sequence[str]

    def sizes(self) -> Ints:
        return np.diff(self.offsets)


def group_by_client(owner: Ints, clients: Sequence[str]) -> Partition:
    """From each row's owner, a position among the clients, to each owner's rows; a negative owner is nobody."""
    sizes = np.bincount(owner[owner >= 0], minlength=len(clients))
    if not sizes.all():
        raise DataError(f"client '{clients[int(sizes.argmin())]}' would get no examples; use fewer clients")
    rows = np.argsort(owner, kind="stable")[np.count_nonzero(owner < 0) :]
    return Partition(rows, np.concatenate([[0], np.cumsum(sizes)]), clients)


class PartsByPosition(Protocol):
    """The parts of each client, by the client's position in the population."""

    def __getitem__(self, position: int, /) -> Parts: ...


@dataclass(frozen=True, eq=False)
class ClientSplit:
    """A client's rows in an order keyed by its name: test first, then validation, both rounded down, the rest is train.

    So train has at least one row, and a part that a client has too few rows for is empty.
    """

    partition: Partition
    key: Key
    validation: Fraction
    test: Fraction

    def __post_init__(self) -> None:
        for name, share in ("validation", self.validation), ("test", self.test):
            if share < 0:
                raise DataError(f"the {name} part cannot be {float(share)} of a client's rows; give a share from 0 up")
        if self.validation + self.test >= 1:
            raise DataError(
                f"validation = {float(self.validation)} and test = {float(self.test)} leave nothing to train on; "
                "their sum must be below 1"
            )

    def __getitem__(self, position: int, /) -> Parts:
        start, stop = self.partition.offsets[position : position + 2]
        rows = torch.from_numpy(self.partition.rows[start:stop])
        rows = rows[(self.key / self.partition.clients[position]).permutation(len(rows))]
        test = floor(len(rows) * self.test)
        train = test + floor(len(rows) * self.validation)
        return rows[train:], rows[test:train], rows[:test]


@dataclass(frozen=True, eq=False)
class Federation:
    """A task among clients; each has its own train, validation and test part, made when asked for."""

    task: Task
    clients: Sequence[str]
    parts: PartsByPosition

    def __getitem__(self, client: str) -> ClientData:
        train, validation, test = (Subset(self.task.train, rows) for rows in self.parts[self.clients.index(client)])
        return ClientData(train, validation, test)

    @property
    def test(self) -> Examples:
        """The central test set, which no client holds."""
        return self.task.test

    @property
    def classes(self) -> tuple[str, ...]:
        return self.task.classes

    def to(self, device: torch.device) -> Federation:
        """Images where they will be needed, once for all rounds. Tokens are few, and stay where batches are padded."""
        moved = {
            name: table.to(device)
            for name, table in (("train", self.task.train), ("test", self.task.test))
            if isinstance(table, Table)
        }
        return replace(self, task=replace(self.task, **moved))  # type: ignore[arg-type]

    def pooled(self) -> Federation:
        """One client who holds everybody's parts, each part joined with its like."""
        train, validation, test = zip(*(self.parts[position] for position in range(len(self.clients))), strict=True)
        return Federation(
            self.task, NamedClients(["pooled"]), [(torch.cat(train), torch.cat(validation), torch.cat(test))]
        )
