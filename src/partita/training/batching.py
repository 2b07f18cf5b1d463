"""Collates the batches of several clients, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise, zip_longest

import torch

from partita.core.batch_schedule import BatchSchedule
from partita.core.data import EXAMPLE_SEEDS, IGNORE_INDEX, Batch, Examples, PrefetchingExamples, TableExamples
from partita.core.group_units import GroupUnits
from partita.core.keyed_bits import example_seeds
from partita.core.rng import Key
from partita.training.batch_shapes import StepShape, round_up, step_shapes, token_limits, widen
from partita.training.padding_meter import PaddingMeter

NO_ROWS = torch.zeros(0, dtype=torch.long)  # the batch of a client that has finished
SMALL_COPY = 2**16  # bytes up to which the driver takes a copy of its own, so that the host need not wait
MEMBER_BITS = 2  # leading bits of padded numbers of members of a group


def iterate_batches(
    examples: Sequence[Examples],
    schedules: Sequence[BatchSchedule],
    device: torch.device,
    seed_keys: Sequence[Key] | None = None,
    shapes: Sequence[StepShape] | None = None,
    meter: PaddingMeter | None = None,
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
        shapes: The shape of each step, from `step_shapes` with a padding. Widths of tokens are then padded too. None
            for no more padding than a step needs.
        meter: Counts the padding, if given.
    """
    own_schedules = schedules  # with indices of each client's own examples, which seeds depend on
    table = _shared_table(examples) if len(examples) > 1 else None
    if table is not None:
        pairs = zip(examples, schedules, strict=True)
        rows = (part.indices.index_select(0, schedule.order) for part, schedule in pairs)  # type: ignore[attr-defined]
        schedules = [BatchSchedule(order, schedule.sizes) for order, schedule in zip(rows, schedules, strict=True)]
    reads_ahead = isinstance(getattr(examples[0], "table", examples[0]), PrefetchingExamples)
    padded = shapes is not None
    limits = token_limits(examples[0]) if padded else None
    shapes = step_shapes([schedule.sizes for schedule in schedules]) if shapes is None else shapes
    own_steps = zip_longest(*own_schedules)
    steps = pairwise(chain(zip_longest(*schedules), [()]))
    for number, ((step, following), shape) in enumerate(zip(steps, shapes, strict=True)):
        current = _of_step(step, shape)
        if table is not None:
            batch = _take_together(table, current, shape)
        else:
            parts = [_take(part, indices) for part, indices in zip(examples, current[: shape.active], strict=False)]
            parts += [_nothing(parts[0])] * (shape.clients - shape.active)
            wanted = shape if padded else None
            batch = _pad(parts[0], wanted) if len(examples) == 1 else collate(parts, wanted)
        if limits is not None:
            batch = widen(batch, limits, _token_dim(examples))
        if meter is not None:
            meter.add(batch)
        if seed_keys is not None:
            drawn = _of_step(next(own_steps), shape)
            sizes = batch.targets.shape[int(len(examples) > 1) :]
            own = [_own_places(part, indices, sizes) for part, indices in zip(examples, drawn, strict=False)]
            seeds = example_seeds(seed_keys[: len(current)], number, torch.stack(own))
            if isinstance(examples[0], GroupUnits):
                seeds = seeds.unflatten(1, (-1, sizes[1]))
            seeds = seeds if len(examples) > 1 else seeds[0]
            batch = replace(batch, inputs={**batch.inputs, EXAMPLE_SEEDS: seeds})
        if reads_ahead:
            _prefetch(examples if table is None else [table], following)
        yield _place(batch, device)


def _of_step(step: Sequence[torch.Tensor | None], shape: StepShape) -> list[torch.Tensor]:
    """The rows of each client of a batch, none for those that have finished."""
    return [NO_ROWS if indices is None else indices for indices in step[: shape.clients]]


def _token_dim(examples: Sequence[Examples]) -> int:
    """The dimension of the tokens in a batch: after client, group and example."""
    return 1 + int(len(examples) > 1) + int(isinstance(examples[0], GroupUnits))


def collate(batches: Sequence[Batch], shape: StepShape | None = None) -> Batch:
    """Stack the batches of several clients into one of shape (client, example, ...), or (client, group, member, ...).

    Smaller batches are padded with copies of their first example, which the mask excludes. Token sequences of different
    lengths are padded with zeros, and their targets with `IGNORE_INDEX`.

    Args:
        batches: The batch of each client.
        shape: The shape of the result; None for the size of the largest batch, and a mask if others are smaller.
    """
    if all(batch.mask is not None and batch.mask.ndim == 2 for batch in batches):
        return _collate_groups(batches, shape)
    sizes = [len(batch.targets) for batch in batches]
    longest = max(sizes) if shape is None else shape.units
    masked = min(sizes) < longest if shape is None else shape.masked

    def pad(value: torch.Tensor, width: int, fill: int) -> torch.Tensor:
        if value.ndim > 1 and value.shape[1] < width:
            value = torch.cat([value, value.new_full((len(value), width - value.shape[1], *value.shape[2:]), fill)], 1)
        missing = longest - len(value)
        return torch.cat([value, value[:1].expand(missing, *value.shape[1:])]) if missing else value

    def join(values: Sequence[torch.Tensor], fill: int) -> torch.Tensor:
        width = max(value.shape[1] if value.ndim > 1 else 0 for value in values)
        return torch.stack([pad(value, width, fill) for value in values])

    inputs = {name: join([batch.inputs[name] for batch in batches], 0) for name in batches[0].inputs}
    mask = None
    if masked or any(batch.mask is not None for batch in batches):
        mask = torch.zeros(len(batches), longest)  # (client, example)
        for row, batch in zip(mask, batches, strict=True):
            row[: len(batch.targets)] = 1.0 if batch.mask is None else batch.mask
    return Batch(inputs, join([batch.targets for batch in batches], IGNORE_INDEX), mask)


def _collate_groups(batches: Sequence[Batch], shape: StepShape | None) -> Batch:
    """Stack batches of groups. Groups are widened to the same number of members; the rest is as for examples."""
    width = max(batch.targets.shape[1] for batch in batches)
    if shape is not None:
        width = round_up(width, MEMBER_BITS)
        shape = replace(shape, units=shape.units * width)

    def flat(value: torch.Tensor) -> torch.Tensor:
        missing = width - value.shape[1]
        return torch.cat([value, value[:, :1].expand(-1, missing, *value.shape[2:])], 1).flatten(0, 1)

    def mask_of(batch: Batch) -> torch.Tensor:
        assert batch.mask is not None
        return torch.nn.functional.pad(batch.mask, (0, width - batch.mask.shape[1])).flatten()

    whole = collate(
        [
            Batch({name: flat(value) for name, value in batch.inputs.items()}, flat(batch.targets), mask_of(batch))
            for batch in batches
        ],
        shape,
    )

    def by_group(value: torch.Tensor) -> torch.Tensor:
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


def _take_together(table: Examples, rows: Sequence[torch.Tensor], shape: StepShape) -> Batch:
    """The same batch as from `collate`, with one lookup in the table."""
    mask = None
    if shape.masked:
        sizes = torch.tensor([len(indices) for indices in rows])
        mask = (torch.arange(shape.units) < sizes.unsqueeze(1)).float()  # (client, example)
        # A client without examples repeats one of the batch, so that the batch does not become longer by its tokens.
        some = next((indices[:1] for indices in rows if len(indices)), NO_ROWS)
        rows = [_padded(indices if len(indices) else some, shape.units) for indices in rows]
    batch = table.take(torch.cat(list(rows)))

    def by_client(value: torch.Tensor) -> torch.Tensor:
        return value.view(len(rows), shape.units, *value.shape[1:])

    return Batch({name: by_client(value) for name, value in batch.inputs.items()}, by_client(batch.targets), mask)


def _own_places(examples: Examples, indices: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the places of a client's examples in a batch of this shape, (example,); of all members for groups."""
    if not isinstance(examples, GroupUnits):
        return _padded(indices, shape[0])
    rows, _ = examples.members(indices)  # (group, member)
    rows = torch.cat([rows, rows[:, :1].expand(-1, shape[1] - rows.shape[1])], 1)
    return _padded(rows.flatten(), shape[0] * shape[1])


def _padded(rows: torch.Tensor, longest: int) -> torch.Tensor:
    """Pad row indices to a length with the first index, or with 0 if there is none."""
    first = rows[:1] if len(rows) else rows.new_zeros(1)
    return torch.cat([rows, first.expand(longest - len(rows))])


def _prefetch(sources: Sequence[Examples], step: Sequence[torch.Tensor | None]) -> None:
    """Start to read the examples of a step, from one source for each client or one for all."""
    rows = [indices for indices in step if indices is not None]
    if len(sources) < len(rows):
        rows = [torch.cat(rows)]
    for source, indices in zip(sources, rows, strict=False):
        if isinstance(source, PrefetchingExamples):
            source.prefetch(indices)


def _take(examples: Examples, indices: torch.Tensor) -> Batch:
    """Take a batch. An empty one becomes one masked unit: not all data supports an empty lookup."""
    return examples.take(indices) if len(indices) else _nothing(examples.take(torch.zeros(1, dtype=torch.long)))


def _nothing(batch: Batch) -> Batch:
    """The first unit of a batch, masked: what a client computes that has finished, or drew no examples."""
    mask = torch.zeros(1) if batch.mask is None else torch.zeros_like(batch.mask[:1])
    return Batch({name: value[:1] for name, value in batch.inputs.items()}, batch.targets[:1], mask)


def _pad(batch: Batch, shape: StepShape | None) -> Batch:
    """Pad the batch of a single client."""
    if shape is None or (batch.mask is None and not shape.masked):
        return batch
    whole = collate([batch], shape)
    mask = None if whole.mask is None else whole.mask[0]
    return Batch({name: value[0] for name, value in whole.inputs.items()}, whole.targets[0], mask)


def _place(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to the device. A large copy to a GPU waits for all work before it, unless the memory is pinned."""

    def placed(value: torch.Tensor) -> torch.Tensor:
        large = device.type == "cuda" and value.device.type == "cpu" and value.nbytes > SMALL_COPY
        return (value.pin_memory() if large else value).to(device, non_blocking=True)

    mask = None if batch.mask is None else placed(batch.mask)
    return Batch({name: placed(value) for name, value in batch.inputs.items()}, placed(batch.targets), mask)
