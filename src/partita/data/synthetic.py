"""Gaussian clouds in the shape of images: for tests of scale and of domain splits, not for claims about learning."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from partita.core import memory
from partita.core.options import Count, NotNegative
from partita.core.rng import Key
from partita.data.task import Side, Table, Task


def synthetic(
    key: Key,
    examples: Annotated[Count, "training examples of all clients"] = 2_000,
    test_examples: Annotated[Count, "examples of the central test set"] = 500,
    classes: Annotated[Count, "classes"] = 10,
    size: Annotated[Side, "pixels of a side"] = 8,
    channels: Annotated[Count, "channels of an image"] = 1,
    domains: Annotated[Count, "domains, each with a shift of its own; the column `domain` says which"] = 1,
    noise: Annotated[NotNegative, "standard deviation of an example around its class"] = 1.0,
    shift: Annotated[NotNegative, "standard deviation of the domains' shifts"] = 1.0,
) -> Task:
    """An image is its class's prototype, plus `shift` times its domain's, plus `noise` times its own Gaussian draw."""
    shape = (channels, size, size)
    images = (examples + test_examples + classes + domains) * math.prod(shape)
    remedy = "lower data.examples, data.test_examples, data.classes, data.domains, data.channels or data.size"
    # Each number is 4 bytes, and is held twice while the prototypes are added; a name takes some hundred bytes.
    memory.require(
        8 * images + 500 * (classes + domains) + 100 * (examples + test_examples), "the synthetic data", remedy
    )
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
