"""Gaussian clouds in the shape of images: for tests of scale and of domain splits, not for claims about learning."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from partita.core.rng import Key
from partita.data.errors import DataError
from partita.data.task import Table, Task


def synthetic(
    key: Key,
    examples: int = 2_000,
    test_examples: int = 500,
    classes: int = 10,
    size: int = 8,
    channels: int = 1,
    domains: int = 1,
    noise: float = 1.0,
    shift: float = 1.0,
) -> Task:
    """An image is its class's prototype, plus `shift` times its domain's, plus `noise` times its own Gaussian draw."""
    counts = {"examples": examples, "test_examples": test_examples, "classes": classes, "size": size}
    for name, count in {**counts, "channels": channels, "domains": domains}.items():
        if count < 1:
            raise DataError(f"{name} = {count} of the synthetic task is no count; give a whole number from 1 up")
    shape = (channels, size, size)
    prototypes = torch.randn(classes, *shape, generator=(key / "classes").generator())
    # One domain has nothing to differ from.
    styles = torch.randn(domains, *shape, generator=(key / "domains").generator()) * (shift if domains > 1 else 0.0)

    def table(key: Key, count: int) -> tuple[Table, Tensor]:
        labels = (key / "labels").permutation(count) % classes
        places = (key / "places").permutation(count) % domains
        pixels = torch.randn(count, *shape, generator=(key / "noise").generator()).mul_(noise)
        pixels += prototypes[labels]
        pixels += styles[places]
        return Table({"pixel_values": pixels}, labels), places

    train, places = table(key / "train", examples)
    names = np.array([f"domain{number}" for number in range(domains)])
    return Task(
        "synthetic",
        train,
        table(key / "test", test_examples)[0],
        classes=tuple(f"class{number}" for number in range(classes)),
        columns={"domain": names[places.numpy()]},
        channels=channels,
        size=size,
    )
