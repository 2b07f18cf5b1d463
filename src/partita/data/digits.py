"""The 8 by 8 handwritten digits of scikit-learn: a small real image task that needs no download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from partita.core.rng import Key
from partita.data.task import Table, Task


def digits(key: Key) -> Task:
    """The handwritten digits of scikit-learn: 1,797 grayscale images. A fifth of each class is the central test set."""
    pixels, targets = read_digits()
    pixels = pixels / 8 - 1
    train, test = _stratified(targets, 5, key)
    return Task(
        "digits",
        Table({"pixel_values": pixels[train]}, targets[train]),
        Table({"pixel_values": pixels[test]}, targets[test]),
        classes=tuple(str(digit) for digit in range(10)),
        channels=1,
        size=8,
    )


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pixels, from 0 to 16, (row, channel, height, width), and the digits, (row,)."""
    table = torch.tensor(np.loadtxt(_file(), np.float32, delimiter=","))  # (row, pixels + class)
    return table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].long()


def _file() -> Path:
    """Locate scikit-learn's data file without importing scikit-learn, which would take longer than a small run."""
    spec = find_spec("sklearn")
    assert spec is not None, "scikit-learn is a dependency of partita"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")


def _stratified(targets: torch.Tensor, one_in: int, key: Key) -> tuple[torch.Tensor, torch.Tensor]:
    """Split row indices into train and test. One in `one_in` rows of each class is test."""
    kept, held = [], []
    for label in range(10):
        rows = (targets == label).nonzero().flatten()
        rows = rows[(key / "test" / label).permutation(len(rows))]
        count = round(len(rows) / one_in)
        kept.append(rows[count:])
        held.append(rows[:count])
    return torch.cat(kept).sort().values, torch.cat(held).sort().values
