"""Rows of tokens, each as long as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from partita.core.data import IGNORE_INDEX, Batch
from partita.data.errors import DataError

PAD_TO_MULTIPLE_OF = 8  # few different widths, which kernels like


@dataclass(frozen=True, eq=False)
class RaggedExamples:
    """Rows of tokens held end to end. A batch is padded with zeros, which attention does not see, to its longest row
    rounded up to a multiple of eight.
    """

    ids: Tensor  # (token,) of all rows
    offsets: Tensor  # (row + 1,): row i has ids[offsets[i]:offsets[i + 1]]
    targets: Tensor  # (row, ...), or (token,) where each token has one
    limit: int  # no row is longer, and no batch is padded beyond
    each_token: bool = False

    def __post_init__(self) -> None:
        lengths = self.offsets.diff()
        if len(lengths) and (int(lengths.min()) < 1 or int(lengths.max()) > self.limit):
            raise DataError(f"rows have {int(lengths.min())} to {int(lengths.max())} tokens, not 1 to {self.limit}")
        wanted = len(self.ids) if self.each_token else len(lengths)
        if len(self.targets) != wanted:
            raise DataError(
                f"there are {len(self.targets)} targets for {wanted} {'tokens' if self.each_token else 'rows'}"
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def words(self) -> int:
        """The smallest vocabulary that holds every token."""
        return int(self.ids.max()) + 1 if len(self.ids) else 0

    def take(self, indices: Tensor) -> Batch:
        starts = self.offsets[indices].unsqueeze(1)
        lengths = self.offsets[indices + 1].unsqueeze(1) - starts
        width = min(-(-int(lengths.max()) // PAD_TO_MULTIPLE_OF) * PAD_TO_MULTIPLE_OF, self.limit)
        steps = torch.arange(width)
        real = steps < lengths  # (row, token)
        places = (starts + steps).clamp_(max=len(self.ids) - 1)
        inputs = {
            "input_ids": self.ids[places].long().masked_fill_(~real, 0),
            "attention_mask": real.long(),
        }
        if self.each_token:
            return Batch(inputs, self.targets[places].long().masked_fill_(~real, IGNORE_INDEX))
        return Batch(inputs, self.targets[indices])


def ragged(
    rows: Sequence[Sequence[int]], limit: int, targets: Tensor | None = None, tags: Sequence[Sequence[int]] = ()
) -> RaggedExamples:
    """From lists: with one target a row, or with tags, one a token."""
    ids = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int32)
    offsets = torch.tensor([0, *accumulate(map(len, rows))])
    if targets is not None:
        return RaggedExamples(ids, offsets, targets, limit)
    return RaggedExamples(ids, offsets, torch.tensor(list(chain.from_iterable(tags)), dtype=torch.int32), limit, True)
