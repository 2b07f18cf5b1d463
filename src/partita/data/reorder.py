"""Give clients different orders of the same content: patches of images, or tokens of texts, for studies of attention.

A client's examples are reordered once, when the data is split, so all its parts and rounds see the same order. The rows
of the central test set are dealt out evenly over the orders, because no client holds them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from partita.core.rng import Key
from partita.data.errors import DataError
from partita.data.ragged import RaggedExamples
from partita.data.task import Federation, Rows, Table, Task

Reorder = Literal["patches", "windows", "reverse"]


def reorder(federation: Federation, how: Reorder, size: int | None, orders: int | None, key: Key) -> Federation:
    """Return the federation with the content of every example in its client's order.

    Client number i has order i modulo `orders`. Orders are drawn independently, so two of them can be equal if few are
    possible. With "reverse" there are two: order 0 is unchanged and order 1 is reversed.

    Args:
        federation: The federation.
        how: "patches": square patches of images. "windows": tokens within windows of consecutive ones. "reverse": all
            tokens of a text. Special tokens, such as [CLS], keep their places.
        size: Side of a patch in pixels, or tokens of a window; None with "reverse".
        orders: Number of orders; None for one per client.
        key: Key for the orders and for the deal of the test rows.

    Raises:
        DataError: If the task has other inputs or a target for each token or pixel, or if an option does not fit.
    """
    task = federation.task
    _check(task, how, size, orders)
    clients = len(federation.clients) + len(federation.unseen)
    count = 2 if how == "reverse" else orders or clients
    of_row = torch.zeros(len(task.train), dtype=torch.long)
    for position in range(clients):
        for rows in federation.parts[position]:
            of_row[rows] = position % count
    tables = [
        _table(task, table, how, size, of_rows, count, key)
        for table, of_rows in ((task.train, of_row), (task.test, _deal(task.test, count, key / "test")))
    ]
    what = "patches of the images" if how == "patches" else "tokens of the texts"
    note = f"the {what} have {count} orders, by client; the test rows are dealt out over them"
    return replace(federation, task=replace(task, train=tables[0], test=tables[1], notes=(*task.notes, note)))


def _check(task: Task, how: Reorder, size: int | None, orders: int | None) -> None:
    inputs = "image" if how == "patches" else "text"
    if task.kind.inputs != inputs or task.kind.head != inputs:
        kinds = "of images with a target per image" if how == "patches" else "of texts with a target per text"
        raise DataError(f"split.reorder = '{how}' is for tasks {kinds}, not for {task.name}; leave it out")
    if task.new is not None:
        raise DataError("split.reorder does not go with data.new_classes; leave one of them out")
    if how == "reverse":
        if size is not None or orders is not None:
            raise DataError(
                "split.reorder = 'reverse' has no size and two orders; leave split.reorder_size and split.orders out"
            )
    elif size is None:
        unit = "the side of a patch in pixels" if how == "patches" else "the tokens of a window"
        raise DataError(f"split.reorder = '{how}' needs split.reorder_size, {unit}")
    elif how == "patches" and (task.size % size or size == task.size):
        sides = ", ".join(str(side) for side in range(1, task.size) if task.size % side == 0)
        raise DataError(
            f"split.reorder_size is {size}, but images of {task.size} pixels must be several patches; use {sides}"
        )


def _deal(table: Rows, count: int, key: Key) -> torch.Tensor:
    """Return the order of each test row, (row,). Windows of one text have the same order."""
    documents: torch.Tensor | None = getattr(table, "documents", None)
    rows = len(table) if documents is None else int(documents.max()) + 1
    orders = torch.empty(rows, dtype=torch.long)
    orders[key.permutation(rows)] = torch.arange(rows) % count
    return orders if documents is None else orders[documents]


def _table(task: Task, table: Rows, how: Reorder, size: int | None, of_row: torch.Tensor, count: int, key: Key) -> Rows:
    if how == "patches":
        if not isinstance(table, Table):
            raise DataError("split.reorder needs the images in memory; raise data.memory, or lower data.size or limit")
        assert size is not None
        pixels = table.inputs["pixel_values"].clone()  # (row, channel, side, side)
        side = task.size // size
        for order in of_row.unique().tolist():
            rows = of_row == order
            pixels[rows] = permute_patches(pixels[rows], size, (key / "patches" / order).permutation(side * side))
        return replace(table, inputs={**table.inputs, "pixel_values": pixels})
    if not isinstance(table, RaggedExamples) or table.segments is not None or task.tokenizer is None:
        raise DataError(f"split.reorder = '{how}' is for single texts; leave it or data.pair out")
    special = set(task.tokenizer.all_special_ids) - {task.tokenizer.unk_token_id}
    content = ~torch.isin(table.ids, torch.tensor(sorted(special), dtype=table.ids.dtype))
    if how == "reverse":
        sources = reversed_places(content, table.offsets, of_row)
    else:
        assert size is not None
        permutations = torch.stack([(key / "windows" / order).permutation(size) for order in range(count)])
        sources = window_places(content, table.offsets, of_row, permutations)
    return replace(table, ids=table.ids[sources])


def permute_patches(pixels: torch.Tensor, size: int, permutation: torch.Tensor) -> torch.Tensor:
    """Permute the patches of images: patch i of the result is patch `permutation[i]`, counted row by row.

    Args:
        pixels: (row, channel, side, side).
        size: Side of a patch in pixels, which divides the side of the images.
        permutation: (patch,).
    """
    patches = pixels.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # (row, channel, y, in y, x, in x)
    grid = patches.shape[2]
    patches = patches.transpose(3, 4).flatten(2, 3)[:, :, permutation]  # (row, channel, patch, in y, in x)
    return patches.unflatten(2, (grid, grid)).transpose(3, 4).flatten(4, 5).flatten(2, 3)


def reversed_places(content: torch.Tensor, offsets: torch.Tensor, of_row: torch.Tensor) -> torch.Tensor:
    """Return the place from which each place of the reordered tokens takes its token, (token,).

    Args:
        content: Whether a token may move, (token,).
        offsets: Row i has the tokens offsets[i] to offsets[i + 1], (row + 1,).
        of_row: The order of each row, (row,): rows of order 1 are reversed.
    """
    ranks, counts, rows = _ranks(content, offsets)
    turned = (of_row == 1)[rows]
    return _sources(content, offsets, rows, torch.where(turned, counts[rows] - 1 - ranks, ranks))


def window_places(
    content: torch.Tensor, offsets: torch.Tensor, of_row: torch.Tensor, permutations: torch.Tensor
) -> torch.Tensor:
    """Return the place from which each place of the reordered tokens takes its token, (token,).

    A shorter last window takes the places of its permutation that it has.

    Args:
        content: Whether a token may move, (token,).
        offsets: Row i has the tokens offsets[i] to offsets[i + 1], (row + 1,).
        of_row: The order of each row, (row,).
        permutations: A permutation of a window for each order, (order, window).
    """
    size = permutations.shape[1]
    cut = torch.zeros(len(permutations), size + 1, size, dtype=torch.long)  # (order, length of the window, place)
    for length in range(1, size + 1):
        # The values below `length` are those of `length` places in each permutation, so their order is kept.
        cut[:, length, :length] = permutations[permutations < length].reshape(len(permutations), length)
    ranks, counts, rows = _ranks(content, offsets)
    start = ranks // size * size
    lengths = (counts[rows] - start).clamp(max=size)
    return _sources(content, offsets, rows, start + cut[of_row[rows], lengths, ranks - start])


def _ranks(content: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rank of each content token in its row, (content,), the number by row, and the row of each."""
    rows = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())[content]
    counts = torch.bincount(rows, minlength=len(offsets) - 1)
    return torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows], counts, rows


def _sources(content: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
    """Return the place of the content token with the given rank in its row; places of other tokens are unchanged."""
    counts = torch.bincount(rows, minlength=len(offsets) - 1)
    places = content.nonzero().flatten()
    sources = torch.arange(len(content))
    sources[places] = places[(counts.cumsum(0) - counts)[rows] + ranks]
    return sources
