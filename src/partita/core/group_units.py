"""Groups of examples, such as all examples of a patient, as the units of a private round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partita.core.data import Batch, Examples, PrefetchingExamples
from partita.core.dp_settings import PrivacyError
from partita.core.rng import Key


def number_groups(values: NDArray[Any]) -> NDArray[np.int64]:
    """Number the values, (row,), from 0 in the order of their first appearance.

    With one row for each value, the numbers are those of the rows. So what is drawn for groups is then what would be
    drawn for rows.
    """
    _, first, codes = np.unique(values, return_index=True, return_inverse=True)
    ranks = np.empty(len(first), np.int64)
    ranks[np.argsort(first)] = np.arange(len(first))
    return ranks[codes.reshape(-1)]


def groups_of(examples: Examples) -> torch.Tensor:
    """Return the group of each example, (example,).

    Raises:
        PrivacyError: If the examples have no groups.
    """
    groups: torch.Tensor | None = getattr(examples, "groups", None)
    if groups is None:
        raise PrivacyError("privacy by group needs examples with groups; set privacy.group to a column of the data")
    return groups


def count_groups(examples: Examples) -> int:
    """Return the number of groups with examples; 0 if the examples are on another machine."""
    return len(torch.unique(groups_of(examples))) if len(examples) else 0


@dataclass(frozen=True, eq=False)
class GroupUnits:
    """Examples by group: index i stands for all members of the i-th group.

    A batch has shape (group, member, ...) and a mask (group, member). A group with fewer members than the largest one
    of the batch is filled up with copies of its first member, which the mask excludes.

    Attributes:
        examples: The examples.
        rows: Their places, group by group, (member,).
        offsets: The first member of each group in `rows`, and the number of members, (group + 1,).
    """

    examples: Examples
    rows: torch.Tensor
    offsets: torch.Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def limits(self) -> tuple[int, int] | None:
        """The longest padded rows of tokens, of the inputs and of the targets; None if the examples are no texts."""
        return getattr(self.examples, "limits", None)

    def members(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of the members of some groups and their mask, both (group, member)."""
        counts = (self.offsets[indices + 1] - self.offsets[indices]).unsqueeze(1)
        steps = torch.arange(int(counts.max()) if len(indices) else 1)
        inside = steps < counts
        return self.rows[self.offsets[indices].unsqueeze(1) + steps * inside], inside.float()

    def take(self, indices: torch.Tensor) -> Batch:
        rows, mask = self.members(indices)
        batch = self.examples.take(rows.flatten())

        def by_group(value: torch.Tensor) -> torch.Tensor:
            return value.reshape(*rows.shape, *value.shape[1:])

        inputs = {name: by_group(value) for name, value in batch.inputs.items()}
        return Batch(inputs, by_group(batch.targets), mask if batch.mask is None else mask * by_group(batch.mask))

    def prefetch(self, indices: torch.Tensor) -> None:
        """Start to read the members of the groups if the examples can be read ahead."""
        if isinstance(self.examples, PrefetchingExamples) and len(indices):
            rows, mask = self.members(indices)
            self.examples.prefetch(rows[mask.bool()])


def group_units(examples: Examples, limit: int | None, key: Key) -> GroupUnits:
    """Return the examples by group, with at most `limit` members of each group.

    Which members a group has in the round is drawn independently of all other groups, so that adding a group changes
    the distribution of no other contribution.

    Args:
        examples: The examples, which have groups.
        limit: Maximum number of members; None for no limit.
        key: Key for the draw of members of larger groups.

    Raises:
        PrivacyError: If the examples have no groups.
    """
    codes = torch.from_numpy(number_groups(groups_of(examples).numpy()))
    counts = torch.bincount(codes)
    rows = codes.argsort(stable=True)  # group by group
    if limit is not None and int(counts.max()) > limit:
        shuffled = key.permutation(len(codes))
        shuffled = shuffled[codes[shuffled].argsort(stable=True)]
        place = torch.arange(len(rows)) - (counts.cumsum(0) - counts).repeat_interleave(counts)  # within the group
        drawn = shuffled[place < limit].sort().values
        rows = drawn[codes[drawn].argsort(stable=True)]
        counts = counts.clamp(max=limit)
    return GroupUnits(examples, rows, torch.cat([counts.new_zeros(1), counts.cumsum(0)]))
