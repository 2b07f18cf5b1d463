"""Partitions of rows among clients, and of a client's rows into train, validation and test parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from partita.core.group_units import number_groups
from partita.core.rng import Key
from partita.data.errors import DataError

Ints = NDArray[np.int64]
Parts: TypeAlias = (
    "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"  # row indices of a client's train, validation and test parts
)


@dataclass(frozen=True, eq=False)
class Partition:
    """Assignment of rows to clients: client i owns rows[offsets[i]:offsets[i + 1]]."""

    rows: Ints  # (row,)
    offsets: Ints  # (client + 1,)
    clients: Sequence[str]

    def sizes(self) -> Ints:
        """Return the number of rows of each client, (client,)."""
        return np.diff(self.offsets)


def group_by_client(owner: Ints, clients: Sequence[str]) -> Partition:
    """Build a partition from the owner of each row.

    Args:
        owner: Position of the owning client for each row, (row,). Rows with a negative owner are dropped.
        clients: Client names.

    Raises:
        DataError: If a client would get no rows.
    """
    sizes = np.bincount(owner[owner >= 0], minlength=len(clients))
    if not sizes.all():
        raise DataError(f"client '{clients[int(sizes.argmin())]}' would get no examples; use fewer clients")
    rows = np.argsort(owner, kind="stable")[np.count_nonzero(owner < 0) :]
    return Partition(rows, np.concatenate([[0], np.cumsum(sizes)]), clients)


class PartsByPosition(Protocol):
    """Maps a client's position to the rows of its train, validation and test parts."""

    def __getitem__(self, position: int, /) -> Parts: ...


@dataclass(frozen=True, eq=False)
class ClientSplit:
    """Splits each client's rows into train, validation and test parts.

    The rows are shuffled with a key derived from the client's name. The first rows are the test part and the next ones
    the validation part. Both sizes are rounded down and the rest is the train part. So the train part has at least one
    row, and a part is empty if the client has too few rows for it.

    With groups, whole groups are shuffled and dealt out in this way. So no group is in two parts of a client.

    Attributes:
        partition: The rows of each client.
        key: Key for the shuffles.
        validation: Share of the validation part.
        test: Share of the test part.
        groups: The group of each row, (row,), whose rows must stay together; None if rows have no groups.

    Raises:
        DataError: If a share is negative, or if the shares leave no rows to train on.
    """

    partition: Partition
    key: Key
    validation: Fraction
    test: Fraction
    groups: Ints | None = None

    def __post_init__(self) -> None:
        for name, share in ("validation", self.validation), ("test", self.test):
            if share < 0:
                raise DataError(f"{name} = {float(share)} is negative; set it to a share of at least 0")
        if self.validation + self.test >= 1:
            raise DataError(
                f"validation = {float(self.validation)} and test = {float(self.test)} leave no training rows; "
                "their sum must be below 1"
            )

    def __getitem__(self, position: int, /) -> Parts:
        start, stop = self.partition.offsets[position : position + 2]
        rows = torch.from_numpy(self.partition.rows[start:stop])
        key = self.key / self.partition.clients[position]
        if self.groups is None:
            rows = rows[key.permutation(len(rows))]
            train, test = self._ends(len(rows))
            return rows[train:], rows[test:train], rows[:test]
        groups = torch.from_numpy(number_groups(self.groups[rows.numpy()]))
        count = int(groups.max()) + 1 if len(rows) else 0
        ranks = key.permutation(count).argsort()[groups]  # the place of each row's group in the shuffled order
        rows, ranks = rows[ranks.argsort(stable=True)], ranks.sort().values
        train, test = self._ends(count)
        return rows[ranks >= train], rows[(ranks >= test) & (ranks < train)], rows[ranks < test]

    def _ends(self, count: int) -> tuple[int, int]:
        """Return where the train part starts, and where the test part ends."""
        test = floor(count * self.test)
        return test + floor(count * self.validation), test


@dataclass(frozen=True, eq=False)
class ShotParts:
    """Parts whose train rows are limited to the first `shots` of each class. They are shuffled, so this is a draw.

    Fewer shots are a part of more shots. Validation and test parts stay whole.
    """

    whole: PartsByPosition
    labels: torch.Tensor  # (row,): the class of each train row of the task
    shots: int

    def __getitem__(self, position: int, /) -> Parts:
        train, validation, test = self.whole[position]
        labels = self.labels[train]
        order = labels.argsort(stable=True)
        grouped = labels[order]
        rank = torch.arange(len(train)) - torch.searchsorted(grouped, grouped)  # of a row within its class
        return train[order[rank < self.shots].sort().values], validation, test


@dataclass(frozen=True, eq=False)
class WindowParts:
    """Parts of documents, given as the rows of all their windows. The windows of a document stay together."""

    documents: PartsByPosition
    first: torch.Tensor  # (document + 1,): windows of document i are first[i] to first[i + 1]

    def __getitem__(self, position: int, /) -> Parts:
        train, validation, test = map(self._windows, self.documents[position])
        return train, validation, test

    def _windows(self, rows: torch.Tensor) -> torch.Tensor:
        counts = self.first[rows + 1] - self.first[rows]
        skipped = self.first[rows] - (counts.cumsum(0) - counts)
        return skipped.repeat_interleave(counts) + torch.arange(int(counts.sum()))
