"""A digest of a client's examples, to notice that its data has changed."""

from __future__ import annotations

import hashlib

import torch

from partita.core import tensors
from partita.core.data import Examples
from partita.data.image_reader import ImagesOnDisk

ROWS_TOGETHER = 1024


def examples_digest(examples: Examples) -> str:
    """Return a digest that changes when an example, its target, or the order of examples does.

    Images that are decoded from files on each use are not read: their names, sizes and times of change count instead.
    """
    state = hashlib.blake2b(f"{len(examples)} examples".encode(), digest_size=16)
    table, rows = getattr(examples, "table", examples), getattr(examples, "indices", None)
    if isinstance(table, ImagesOnDisk):
        order = torch.arange(len(examples)) if rows is None else rows
        state.update(f" of images {table.reader.source.fingerprint()} ".encode())
        state.update(tensors.digest({"rows": order, "targets": table.targets}).encode())
        return state.hexdigest()
    for start in range(0, len(examples), ROWS_TOGETHER):
        batch = examples.take(torch.arange(start, min(start + ROWS_TOGETHER, len(examples))))
        state.update(tensors.digest({**batch.inputs, "targets": batch.targets}).encode())
    return state.hexdigest()
