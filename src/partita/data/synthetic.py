"""Synthetic Gaussian images for tests of scale and domain splits, not for claims about learning."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import torch

from partita.core import memory
from partita.core.options import Count, NotNegative
from partita.core.rng import Key
from partita.data.task import Side, Table, Task


def synthetic(
    key: Key,
    examples: Annotated[Count, "number of training examples, all clients together"] = 2_000,
    test_examples: Annotated[Count, "number of examples in the central test set"] = 500,
    classes: Annotated[Count, "number of classes"] = 10,
    size: Annotated[Side, "side length of an image in pixels"] = 8,
    channels: Annotated[Count, "channels per image"] = 1,
    domains: Annotated[Count, "number of domains, each with its own shift; column `domain` names a row's domain"] = 1,
    noise: Annotated[NotNegative, "standard deviation of the examples of a class"] = 1.0,
    shift: Annotated[NotNegative, "standard deviation of the domain shifts"] = 1.0,
) -> Task:
    """Synthetic images: class prototype + `shift` * domain prototype + `noise` * Gaussian noise."""
    shape = (channels, size, size)
    images = (examples + test_examples + classes + domains) * math.prod(shape)
    remedy = "lower data.examples, data.test_examples, data.classes, data.domains, data.channels or data.size"
    # A number takes 4 bytes and exists twice while the prototypes are added. A name takes a few hundred bytes.
    memory.require(
        8 * images + 500 * (classes + domains) + 100 * (examples + test_examples), "the synthetic data", remedy
    )
    prototypes = torch.randn(classes, *shape, generator=(key / "classes").generator())
    # A single domain needs no shift.
    styles = torch.randn(domains, *shape, generator=(key / "domains").generator()) * (shift if domains > 1 else 0.0)

    def table(key: Key, count: int) -> tuple[Table, torch.Tensor]:
        labels = (key / "labels").permutation(count) % classes
        places = (key / "places").permutation(count) % domains
        pixels = torch.randn(count, *shape, generator=(key / "noise").generator()).mul_(noise)
        pixels += prototypes[labels]
        pixels += styles[places]
        return Table({"pixel_values": pixels}, labels), places

    (train, places), (test, test_places) = table(key / "train", examples), table(key / "test", test_examples)
    names = np.array([f"domain{number}" for number in range(domains)])
    return Task(
        "synthetic",
        train,
        test,
        classes=tuple(f"class{number}" for number in range(classes)),
        columns={"domain": names[places.numpy()]},
        channels=channels,
        size=size,
        test_columns={"domain": names[test_places.numpy()]},
    )
