"""Token rows of different lengths, stored without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import torch

from partita.core.data import IGNORE_INDEX, Batch
from partita.data.errors import DataError
from partita.data.token_rows import TokenRows

PAD_TO_MULTIPLE_OF = 8  # few distinct widths, and widths that kernels run fast on


@dataclass(frozen=True, eq=False)
class RaggedExamples:
    """Token rows packed into one tensor.

    A batch is padded with zeros to the length of its longest row, rounded up to a multiple of eight. The attention mask
    excludes the padding.

    Raises:
        DataError: If a row is empty or longer than `limit`, or if the number of targets does not fit.
    """

    ids: torch.Tensor  # (token,), all rows concatenated
    offsets: torch.Tensor  # (row + 1,): row i is ids[offsets[i]:offsets[i + 1]]
    targets: torch.Tensor  # (row, ...), or (token,) with `each_token`
    limit: int  # maximum length of a row and of a padded batch
    each_token: bool = False  # whether each token has a target
    segments: torch.Tensor | None = (
        None  # (token,): 1 for the second text of a pair, for models that tell the texts apart
    )
    documents: torch.Tensor | None = None  # (row,), ascending: the document of each row; None if rows are documents
    known_vocabulary: int | None = None  # smallest vocabulary size that holds every token; None to compute it

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

    def lengths(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the number of tokens of rows, (row,)."""
        return self.offsets[indices + 1] - self.offsets[indices]

    @cached_property
    def limits(self) -> tuple[int, int]:
        """The longest padded rows: of the inputs, and of the targets if each token has one, else 0."""
        return self.width(), self.width() if self.each_token else 0

    def width(self) -> int:
        """Return the number of tokens of the longest padded batch."""
        return padded(int(self.offsets.diff().max()), self.limit) if len(self) else 0

    def vocabulary_size(self) -> int:
        """Return the smallest vocabulary size that holds every token."""
        if self.known_vocabulary is not None:
            return self.known_vocabulary
        return int(self.ids.max()) + 1 if len(self.ids) else 0

    def take(self, indices: torch.Tensor) -> Batch:
        starts = self.offsets[indices].unsqueeze(1)
        lengths = self.offsets[indices + 1].unsqueeze(1) - starts
        width = padded(int(lengths.max()), self.limit)
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


def padded(length: int, limit: int) -> int:
    """Return the width of a batch whose longest row has this length."""
    return min(-(-length // PAD_TO_MULTIPLE_OF) * PAD_TO_MULTIPLE_OF, limit)


def from_rows(rows: TokenRows, limit: int, targets: torch.Tensor | None = None) -> RaggedExamples:
    """Build RaggedExamples from token rows.

    Args:
        rows: The rows.
        limit: Maximum length of a row.
        targets: One target per row, (row, ...). Default: one per token, from the rows.
    """
    of_tokens = rows.targets if targets is None else targets
    if of_tokens is None and not len(rows.ids):
        of_tokens = rows.ids
    assert of_tokens is not None
    return RaggedExamples(
        rows.ids,
        rows.offsets,
        of_tokens,
        limit,
        each_token=targets is None,
        documents=None if targets is None else rows.documents,
        known_vocabulary=rows.vocabulary_size,
    )


def ragged(
    rows: Sequence[Sequence[int]],
    limit: int,
    targets: torch.Tensor | None = None,
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
