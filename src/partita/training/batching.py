"""Collates the batches of several clients, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise, zip_longest

import torch
from torch import Tensor

from partita.core import tensors
from partita.core.batch_schedule import BatchSchedule
from partita.core.data import EXAMPLE_SEEDS, IGNORE_INDEX, Batch, Examples, PrefetchingExamples, TableExamples
from partita.core.group_units import GroupUnits
from partita.core.keyed_bits import example_seeds
from partita.core.rng import Key


def iterate_batches(
    examples: Sequence[Examples],
    schedules: Sequence[BatchSchedule],
    device: torch.device,
    seed_keys: Sequence[Key] | None = None,
    multiple: int = 1,
) -> Iterator[Batch]:
    """Yield one batch per step, of shape (client, example, ...), or (example, ...) for a single client.

    Clients must be ordered by their number of steps, most first: each batch has the leading clients that still have a
    step. If all clients' examples are rows of one table, one lookup serves all clients; the batch is then created on
    the table's device.

    Args:
        examples: The examples of each client.
        schedules: The batches of each client.
        device: The device for the batches.
        seed_keys: The key of each client from which the seeds of its examples are drawn; None for no seeds.
        multiple: Batches are padded to a multiple of this size, so that they have few shapes. Above 1, all batches have
            a mask, which excludes the padding.
    """
    own_schedules = schedules  # with indices of each client's own examples, which seeds depend on
    table = _shared_table(examples) if len(examples) > 1 else None
    if table is not None:
        pairs = zip(examples, schedules, strict=True)
        rows = (part.indices.index_select(0, schedule.order) for part, schedule in pairs)  # type: ignore[attr-defined]
        schedules = [BatchSchedule(order, schedule.sizes) for order, schedule in zip(rows, schedules, strict=True)]
    reads_ahead = isinstance(getattr(examples[0], "table", examples[0]), PrefetchingExamples)
    own_steps = zip_longest(*own_schedules)
    for number, (step, following) in enumerate(pairwise(chain(zip_longest(*schedules), [()]))):
        current = [indices for indices in step if indices is not None]
        if table is not None:
            batch = _take_together(table, current, multiple)
        elif len(examples) == 1:
            batch = _take(examples[0], current[0], multiple)
        else:
            batch = collate([_take(part, indices, multiple) for part, indices in zip(examples, current, strict=False)])
        if seed_keys is not None:
            drawn = [indices for indices in next(own_steps) if indices is not None]
            shape = batch.targets.shape[int(len(examples) > 1) :]
            own = [_own_places(part, indices, shape) for part, indices in zip(examples, drawn, strict=False)]
            seeds = example_seeds(seed_keys[: len(current)], number, torch.stack(own))
            if isinstance(examples[0], GroupUnits):
                seeds = seeds.unflatten(1, (-1, shape[1]))
            seeds = seeds if len(examples) > 1 else seeds[0]
            batch = replace(batch, inputs={**batch.inputs, EXAMPLE_SEEDS: seeds})
        if reads_ahead:
            _prefetch(examples if table is None else [table], following)
        yield _place(batch, device)


def collate(batches: Sequence[Batch]) -> Batch:
    """Stack the batches of several clients into one of shape (client, example, ...), or (client, group, member, ...).

    Smaller batches are padded with copies of their first example, which the mask excludes. Token sequences of different
    lengths are padded with zeros, and their targets with `IGNORE_INDEX`.
    """
    if all(batch.mask is not None and batch.mask.ndim == 2 for batch in batches):
        return _collate_groups(batches)
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


def _collate_groups(batches: Sequence[Batch]) -> Batch:
    """Stack batches of groups. Groups are widened to the same number of members; the rest is as for examples."""
    width = max(batch.targets.shape[1] for batch in batches)

    def flat(value: Tensor) -> Tensor:
        missing = width - value.shape[1]
        return torch.cat([value, value[:, :1].expand(-1, missing, *value.shape[2:])], 1).flatten(0, 1)

    def mask_of(batch: Batch) -> Tensor:
        assert batch.mask is not None
        return torch.nn.functional.pad(batch.mask, (0, width - batch.mask.shape[1])).flatten()

    whole = collate(
        [
            Batch({name: flat(value) for name, value in batch.inputs.items()}, flat(batch.targets), mask_of(batch))
            for batch in batches
        ]
    )

    def by_group(value: Tensor) -> Tensor:
        return value.unflatten(1, (-1, width))

    assert whole.mask is not None
    inputs = {name: by_group(value) for name, value in whole.inputs.items()}
    return Batch(inputs, by_group(whole.targets), by_group(whole.mask))


def _shared_table(examples: Sequence[Examples]) -> Examples | None:
    """The table that holds the examples of all clients, or None."""
    first = examples[0]
    if not isinstance(first, TableExamples):
        return None
    return first.table if all(getattr(part, "table", None) is first.table for part in examples) else None


def _take_together(table: Examples, rows: Sequence[Tensor], multiple: int) -> Batch:
    """The same batch as from `collate`, with one lookup in the table."""
    sizes = [len(indices) for indices in rows]
    longest = _round_up(max(sizes), multiple)
    mask = None
    if min(sizes) < longest or multiple > 1:
        mask = (torch.arange(longest) < torch.tensor(sizes).unsqueeze(1)).float()  # (client, example)
        rows = [_padded(indices, longest) for indices in rows]
    batch = table.take(torch.cat(list(rows)))

    def by_client(value: Tensor) -> Tensor:
        return value.view(len(rows), longest, *value.shape[1:])

    return Batch({name: by_client(value) for name, value in batch.inputs.items()}, by_client(batch.targets), mask)


def _own_places(examples: Examples, indices: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the places of a client's examples in a batch of this shape, (example,); of all members for groups."""
    if not isinstance(examples, GroupUnits):
        return _padded(indices, shape[0])
    rows, _ = examples.members(indices)  # (group, member)
    rows = torch.cat([rows, rows[:, :1].expand(-1, shape[1] - rows.shape[1])], 1)
    return _padded(rows.flatten(), shape[0] * shape[1])


def _padded(rows: Tensor, longest: int) -> Tensor:
    """Pad row indices to a length with the first index, or with 0 if there is none."""
    first = rows[:1] if len(rows) else rows.new_zeros(1)
    return torch.cat([rows, first.expand(longest - len(rows))])


def _prefetch(sources: Sequence[Examples], step: Sequence[Tensor | None]) -> None:
    """Start to read the examples of a step, from one source for each client or one for all."""
    rows = [indices for indices in step if indices is not None]
    if len(sources) < len(rows):
        rows = [torch.cat(rows)]
    for source, indices in zip(sources, rows, strict=False):
        if isinstance(source, PrefetchingExamples):
            source.prefetch(indices)


def _take(examples: Examples, indices: Tensor, multiple: int) -> Batch:
    """Take a batch and pad it. An empty one becomes one masked unit: not all data supports an empty lookup."""
    size = _round_up(len(indices), multiple)
    if len(indices) == size and multiple == 1:
        return examples.take(indices)
    batch = examples.take(indices if len(indices) else torch.zeros(1, dtype=torch.long))
    counts = torch.arange(size) < len(indices)
    missing = size - len(batch.targets)

    def pad(value: Tensor) -> Tensor:
        return torch.cat([value, value[:1].expand(missing, *value.shape[1:])]) if missing else value

    mask = counts.float()
    if batch.mask is not None:  # of groups, (group, member)
        mask = pad(batch.mask) * counts.view(-1, *[1] * (batch.mask.ndim - 1))
    return Batch({name: pad(value) for name, value in batch.inputs.items()}, pad(batch.targets), mask)


def _round_up(size: int, multiple: int) -> int:
    """Return the next multiple, at least one."""
    return max(1, -(-size // multiple)) * multiple


def _place(batch: Batch, device: torch.device) -> Batch:
    mask = None if batch.mask is None else batch.mask.to(device, non_blocking=True)
    return Batch(tensors.to(batch.inputs, device), batch.targets.to(device, non_blocking=True), mask)
