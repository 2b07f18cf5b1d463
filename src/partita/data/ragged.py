"""Token rows of different lengths, stored without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from partita.core.data import IGNORE_INDEX, Batch
from partita.data.errors import DataError

PAD_TO_MULTIPLE_OF = 8  # few distinct widths, and widths that kernels run fast on


@dataclass(frozen=True, eq=False)
class RaggedExamples:
    """Token rows packed into one tensor.

    A batch is padded with zeros to the length of its longest row, rounded up to a multiple of eight. The attention mask
    excludes the padding.

    Raises:
        DataError: If a row is empty or longer than `limit`, or if the number of targets does not fit.
    """

    ids: Tensor  # (token,), all rows concatenated
    offsets: Tensor  # (row + 1,): row i is ids[offsets[i]:offsets[i + 1]]
    targets: Tensor  # (row, ...), or (token,) with `each_token`
    limit: int  # maximum length of a row and of a padded batch
    each_token: bool = False  # whether each token has a target
    segments: Tensor | None = None  # (token,): 1 for the second text of a pair, for models that tell the texts apart

    def __post_init__(self) -> None:
        lengths = self.offsets.diff()
        if len(lengths) and (int(lengths.min()) < 1 or int(lengths.max()) > self.limit):
            raise DataError(f"rows have {int(lengths.min())} to {int(lengths.max())} tokens, not 1 to {self.limit}")
        expected = len(self.ids) if self.each_token else len(lengths)
        if len(self.targets) != expected:
            raise DataError(
                f"there are {len(self.targets)} targets for {expected} {'tokens' if self.each_token else 'rows'}"
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def vocabulary_size(self) -> int:
        """Return the smallest vocabulary size that holds every token."""
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
        if self.segments is not None:
            inputs["token_type_ids"] = self.segments[places].long().masked_fill_(~real, 0)
        if self.each_token:
            return Batch(inputs, self.targets[places].long().masked_fill_(~real, IGNORE_INDEX))
        return Batch(inputs, self.targets[indices])


def ragged(
    rows: Sequence[Sequence[int]],
    limit: int,
    targets: Tensor | None = None,
    tags: Sequence[Sequence[int]] = (),
    segments: Sequence[Sequence[int]] | None = None,
) -> RaggedExamples:
    """Build RaggedExamples from lists.

    Args:
        rows: Token ids of each row.
        limit: Maximum length of a row.
        targets: One target per row, (row, ...).
        tags: One target per token. Used if `targets` is None.
        segments: For pairs of texts, which text each token belongs to; None if the model does not tell them apart.
    """
    ids = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int32)
    offsets = torch.tensor([0, *accumulate(map(len, rows))])
    if targets is not None:
        packed = None if segments is None else torch.tensor(list(chain.from_iterable(segments)), dtype=torch.int8)
        return RaggedExamples(ids, offsets, targets, limit, segments=packed)
    return RaggedExamples(ids, offsets, torch.tensor(list(chain.from_iterable(tags)), dtype=torch.int32), limit, True)
