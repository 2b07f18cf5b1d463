"""Questions with several answers to choose from, as token rows stored without padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from partita.core.data import Batch
from partita.data.ragged import RaggedExamples


@dataclass(frozen=True, eq=False)
class ChoiceExamples:
    """Questions. An example that is taken is a question with its right answer, to train on.

    Attributes:
        answered: Every question with each of its choices, in order. Only the tokens of the choice have targets.
        first: The first row of each question, and the number of rows, (question + 1,).
        right: The place of the right choice of each question, (question,).
    """

    answered: RaggedExamples
    first: torch.Tensor
    right: torch.Tensor

    def __len__(self) -> int:
        return len(self.right)

    @property
    def targets(self) -> torch.Tensor:
        """The targets of all rows, (token,)."""
        return self.answered.targets

    @property
    def limit(self) -> int:
        """The maximum number of tokens of a row."""
        return self.answered.limit

    @property
    def limits(self) -> tuple[int, int]:
        """The longest padded rows, of the inputs and of the targets."""
        return self.answered.limits

    def lengths(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the number of tokens of questions with their right answers, (question,)."""
        return self.answered.lengths(self.first[indices] + self.right[indices])

    def width(self) -> int:
        """Return the number of tokens of the longest padded batch."""
        return self.answered.width()

    def vocabulary_size(self) -> int:
        """Return the smallest vocabulary size that holds every token."""
        return self.answered.vocabulary_size()

    def take(self, indices: torch.Tensor) -> Batch:
        return self.answered.take(self.first[indices] + self.right[indices])

    def take_choices(self, indices: torch.Tensor) -> tuple[Batch, torch.Tensor, torch.Tensor]:
        """Return questions with all their choices.

        Returns:
            `(batch, counts, right)`: the rows of all choices, the number of choices of each question (question,), and
            the place of the right one (question,).
        """
        counts = self.first[indices + 1] - self.first[indices]
        skipped = self.first[indices] - (counts.cumsum(0) - counts)
        rows = skipped.repeat_interleave(counts) + torch.arange(int(counts.sum()))
        return self.answered.take(rows), counts, self.right[indices]
