"""Assemble the batches of clients side by side, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from partita.core import tensors
from partita.core.batch_schedule import BatchSchedule
from partita.core.data import IGNORE_INDEX, Batch, Examples, TableExamples


def iterate_batches(
    examples: Sequence[Examples], schedules: Sequence[BatchSchedule], device: torch.device
) -> Iterator[Batch]:
    """(client, example, ...) for the leading clients, who still have a batch; for a single client, (example, ...).

    Rows of one table are taken for all clients at once, and already lie on the device where the table does.
    """
    table = _shared_table(examples) if len(examples) > 1 else None
    if table is not None:
        pairs = zip(examples, schedules, strict=True)
        rows = (each.indices.index_select(0, schedule.order) for each, schedule in pairs)  # type: ignore[attr-defined]
        schedules = [BatchSchedule(order, schedule.sizes) for order, schedule in zip(rows, schedules, strict=True)]
    for step in zip_longest(*schedules):
        here = [each for each in step if each is not None]
        if table is not None:
            batch = _take_together(table, here)
        elif len(examples) == 1:
            batch = _take(examples[0], here[0])
        else:
            batch = collate([_take(each, indices) for each, indices in zip(examples, here, strict=False)])
        yield _place(batch, device)


def collate(batches: Sequence[Batch]) -> Batch:
    """(client, example, ...): short batches are padded with their first example, which the mask then leaves out.

    Where rows of tokens differ in length, they are padded with zeros, and their targets with such as do not count.
    """
    sizes = [len(batch.targets) for batch in batches]
    longest = max(sizes)

    def pad(value: Tensor, width: int, fill: int) -> Tensor:
        if value.ndim > 1 and value.shape[1] < width:
            value = torch.cat([value, value.new_full((len(value), width - value.shape[1], *value.shape[2:]), fill)], 1)
        missing = longest - len(value)
        return torch.cat([value, value[:1].expand(missing, *value.shape[1:])]) if missing else value

    def join(values: Sequence[Tensor], fill: int) -> Tensor:
        width = max(value.shape[1] if value.ndim > 1 else 0 for value in values)
        return torch.stack([pad(value, width, fill) for value in values])

    inputs = {name: join([batch.inputs[name] for batch in batches], 0) for name in batches[0].inputs}
    mask = None
    if min(sizes) < longest or any(batch.mask is not None for batch in batches):
        mask = torch.zeros(len(batches), longest)  # (client, example)
        for row, batch in zip(mask, batches, strict=True):
            row[: len(batch.targets)] = 1.0 if batch.mask is None else batch.mask
    return Batch(inputs, join([batch.targets for batch in batches], IGNORE_INDEX), mask)


def _shared_table(examples: Sequence[Examples]) -> Examples | None:
    """The table of which all are rows."""
    first = examples[0]
    if not isinstance(first, TableExamples):
        return None
    return first.table if all(getattr(each, "table", None) is first.table for each in examples) else None


def _take_together(table: Examples, rows: Sequence[Tensor]) -> Batch:
    """What `collate` makes of each client's batch, by one look into the table."""
    sizes = [len(each) for each in rows]
    longest = max(*sizes, 1)
    mask = None
    if min(sizes) < longest:
        mask = (torch.arange(longest) < torch.tensor(sizes).unsqueeze(1)).float()  # (client, example)
        rows = [_padded(each, longest) for each in rows]
    batch = table.take(torch.cat(list(rows)))

    def by_client(value: Tensor) -> Tensor:
        return value.view(len(rows), longest, *value.shape[1:])

    return Batch({name: by_client(value) for name, value in batch.inputs.items()}, by_client(batch.targets), mask)


def _padded(rows: Tensor, longest: int) -> Tensor:
    """With its first row, or where there is none with the table's, up to the length."""
    first = rows[:1] if len(rows) else rows.new_zeros(1)
    return torch.cat([rows, first.expand(longest - len(rows))])


def _take(examples: Examples, indices: Tensor) -> Batch:
    """An empty batch is one example that does not count, since not every table can be asked for nothing."""
    if len(indices):
        return examples.take(indices)
    batch = examples.take(torch.zeros(1, dtype=torch.long))
    return Batch(batch.inputs, batch.targets, torch.zeros(1))


def _place(batch: Batch, device: torch.device) -> Batch:
    mask = None if batch.mask is None else batch.mask.to(device, non_blocking=True)
    return Batch(tensors.to(batch.inputs, device), batch.targets.to(device, non_blocking=True), mask)
