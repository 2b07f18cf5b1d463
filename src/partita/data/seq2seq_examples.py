"""Texts with the texts that answer them, as token rows stored without padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from partita.core.data import IGNORE_INDEX, Batch
from partita.data.errors import DataError
from partita.data.ragged import RaggedExamples


@dataclass(frozen=True, eq=False)
class Seq2SeqExamples:
    """Source rows and target rows.

    The targets of a batch are the tokens of the target rows, (example, token), padded with `IGNORE_INDEX`. The input
    "decoder_input_ids" is the same row shifted right, behind the start token of the decoder, as in transformers.

    Raises:
        DataError: If the numbers of rows differ.
    """

    sources: RaggedExamples
    answers: RaggedExamples
    start: int  # token before the first target

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.answers):
            raise DataError(f"there are {len(self.answers)} target texts for {len(self.sources)} source texts")

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def targets(self) -> torch.Tensor:
        """The tokens of all target rows, (token,)."""
        return self.answers.ids

    @property
    def limits(self) -> tuple[int, int]:
        """The longest padded rows, of the sources and of the targets."""
        return self.sources.limits[0], self.answers.limits[0]

    def lengths(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the number of tokens of the sources with their targets, (example,): both cost padding."""
        return self.sources.lengths(indices) + self.answers.lengths(indices)

    def vocabulary_size(self) -> int:
        """Return the smallest vocabulary size that holds every token."""
        return max(self.sources.vocabulary_size(), self.answers.vocabulary_size(), self.start + 1)

    def take(self, indices: torch.Tensor) -> Batch:
        answers = self.answers.take(indices).inputs
        ids = answers["input_ids"]
        decoder_input_ids = torch.cat([ids.new_full((len(ids), 1), self.start), ids[:, :-1]], 1)
        targets = ids.masked_fill(answers["attention_mask"] == 0, IGNORE_INDEX)
        return Batch({**self.sources.take(indices).inputs, "decoder_input_ids": decoder_input_ids}, targets)
