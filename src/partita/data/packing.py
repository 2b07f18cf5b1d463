"""Packing: several short examples in one row of tokens, without attention from one to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from partita.core.data import IGNORE_INDEX, Batch, Examples, text_lengths
from partita.data.ragged import padded


@dataclass(frozen=True, eq=False)
class PackedExamples:
    """Rows of several examples each.

    In a batch, the input "segment_ids" numbers the examples of a row from 1, and is 0 for padding. "position_ids"
    counts the tokens of each example from 0. A model must not attend from one segment to another.

    Attributes:
        examples: The examples.
        order: Their places, row by row, (example,).
        offsets: The first example of each row in `order`, and the number of examples, (row + 1,).
        limit: Maximum number of tokens of a row.
    """

    examples: Examples
    order: torch.Tensor
    offsets: torch.Tensor
    limit: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def limits(self) -> tuple[int, int]:
        """The longest padded rows, of the inputs and of the targets."""
        return self.limit, self.limit

    def lengths(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the number of tokens of rows, (row,)."""
        tokens = text_lengths(self.examples, self.order)
        assert tokens is not None  # only texts are packed
        return torch.cat([tokens.new_zeros(1), tokens.cumsum(0)])[self.offsets].diff()[indices]

    def take(self, indices: torch.Tensor) -> Batch:
        counts = self.offsets[indices + 1] - self.offsets[indices]  # (row,)
        before = counts.cumsum(0) - counts  # examples of the rows before
        places = torch.arange(int(counts.sum())) + (self.offsets[indices] - before).repeat_interleave(counts)
        batch = self.examples.take(self.order[places])
        real = batch.inputs["attention_mask"].bool()  # (example, token)
        ends = real.sum(1).cumsum(0)
        starts = torch.cat([ends.new_zeros(1), ends])  # (example + 1,), counted through all rows
        row_starts = starts[before]  # (row,)
        width = padded(int((starts[before + counts] - row_starts).max()), self.limit)
        row = torch.arange(len(indices)).repeat_interleave(counts)  # (example,)
        steps = torch.arange(real.shape[1])
        first = row * width + starts[:-1] - row_starts[row]
        cells = (first.unsqueeze(1) + steps)[real]  # where each token goes

        def spread(values: torch.Tensor, fill: int = 0) -> torch.Tensor:
            whole = torch.full((len(indices) * width,), fill, dtype=torch.long)
            return whole.index_put_((cells,), values.expand(real.shape)[real]).view(len(indices), width)

        numbers = torch.arange(len(row)) - before[row] + 1  # of an example in its row
        segments = spread(numbers.unsqueeze(1))
        inputs = {
            "input_ids": spread(batch.inputs["input_ids"]),
            "attention_mask": (segments > 0).long(),
            "position_ids": spread(steps),
            "segment_ids": segments,
        }
        return Batch(inputs, spread(batch.targets, IGNORE_INDEX))


def pack(examples: Any) -> PackedExamples:
    """Pack the examples of one client into as few rows as a simple rule finds (best fit, the longest first).

    Args:
        examples: A subset of a table of token rows.
    """
    table = examples.table
    lengths: list[int] = table.lengths(examples.indices).tolist()
    rows: list[list[int]] = []
    room: dict[int, list[int]] = {}  # rows by their free tokens
    free = 0  # the keys of `room` that have a row, as bits
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        length = lengths[place]
        fitting = free >> length
        left = length + (fitting & -fitting).bit_length() - 1 if fitting else table.limit
        if fitting:
            number = room[left].pop()
            if not room[left]:
                free ^= 1 << left
        else:
            number = len(rows)
            rows.append([])
        rows[number].append(place)
        left -= length
        room.setdefault(left, []).append(number)
        free |= 1 << left
    order = torch.tensor([place for row in rows for place in row], dtype=torch.long)
    counts = torch.tensor([0, *map(len, rows)], dtype=torch.long)
    return PackedExamples(examples, order, counts.cumsum(0), table.limit)
