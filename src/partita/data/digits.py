"""Handwritten digits, 8 by 8, from scikit-learn: the smallest real image task, and it needs no download."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.core.rng import Key
from partita.data.task import Table, Task


def digits(key: Key) -> Task:
    """1,797 grey images; a fifth of each class is the central test set."""
    from sklearn.datasets import load_digits  # slow to import, and no other task needs it

    bunch = load_digits()
    pixels = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # (row, channel, height, width)
    targets = torch.tensor(bunch.target, dtype=torch.int64)
    train, test = _stratified(targets, 5, key)
    return Task(
        "digits",
        Table({"pixel_values": pixels[train]}, targets[train]),
        Table({"pixel_values": pixels[test]}, targets[test]),
        classes=tuple(str(digit) for digit in range(10)),
        channels=1,
        size=8,
    )


def _stratified(targets: Tensor, one_in: int, key: Key) -> tuple[Tensor, Tensor]:
    """Rows to keep, and one row in so many of each class to hold out."""
    kept, held = [], []
    for label in range(10):
        rows = (targets == label).nonzero().flatten()
        rows = rows[(key / "test" / label).permutation(len(rows))]
        count = round(len(rows) / one_in)
        kept.append(rows[count:])
        held.append(rows[:count])
    return torch.cat(kept).sort().values, torch.cat(held).sort().values
