"""Handwritten digits, 8 by 8, from scikit-learn: the smallest real image task, and it needs no download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from partita.core.rng import Key
from partita.data.task import Table, Task


def digits(key: Key) -> Task:
    """1,797 grey images; a fifth of each class is the central test set."""
    table = torch.tensor(np.loadtxt(_file(), np.float32, delimiter=","))  # (row, pixel), and the class at the end
    pixels = table[:, :-1].reshape(-1, 1, 8, 8) / 8 - 1  # (row, channel, height, width)
    targets = table[:, -1].long()
    train, test = _stratified(targets, 5, key)
    return Task(
        "digits",
        Table({"pixel_values": pixels[train]}, targets[train]),
        Table({"pixel_values": pixels[test]}, targets[test]),
        classes=tuple(str(digit) for digit in range(10)),
        channels=1,
        size=8,
    )


def _file() -> Path:
    """Where scikit-learn keeps them; to import it for the one file would take longer than a small run."""
    found = find_spec("sklearn")
    assert found is not None, "scikit-learn is among partita's own requirements"
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")


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
