"""exampletask: which half of a small image is bright?"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch

from partita import Key, Range, Table, Task

SIZE = 8
CLASSES = ("top", "bottom", "left", "right")


# Every argument except `key` is an option in the config. Its range is checked.
def exampletask(
    key: Key,
    noise: Annotated[float, Range(low=0, high=10), "standard deviation of the noise of a pixel"] = 0.5,
) -> Task:
    """Images of 8 by 8 pixels, of which one half is bright. Replace the body by code that reads your data."""
    train, sites = _table(key / "train", 400, noise)
    test, _ = _table(key / "test", 100, noise)
    return Task(
        "exampletask",
        train,
        test,
        classes=CLASSES,
        # A split such as 'by_column' reads columns: here one client per site.
        columns={"site": np.array([f"site{site}" for site in sites.tolist()])},
        channels=1,
        size=SIZE,
    )


def _table(key: Key, count: int, noise: float) -> tuple[Table, torch.Tensor]:
    """Return the examples and the site of each. Random numbers come from the key, so that a run can be repeated."""
    targets = (key / "targets").permutation(count) % len(CLASSES)  # (row,)
    sites = (key / "sites").permutation(count) % 5
    half = SIZE // 2
    shapes = torch.zeros(len(CLASSES), 1, SIZE, SIZE)  # (class, channel, height, width)
    shapes[0, :, :half], shapes[1, :, half:], shapes[2, :, :, :half], shapes[3, :, :, half:] = 1.0, 1.0, 1.0, 1.0
    pixels = torch.randn(count, 1, SIZE, SIZE, generator=(key / "noise").generator()) * noise
    # The model for images takes "pixel_values": (row, channel, height, width).
    return Table({"pixel_values": pixels + shapes[targets]}, targets), sites
