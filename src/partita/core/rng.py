"""Keys for random draws: a draw depends on its path alone, not on order, block size, engine or method."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Key:
    """`Key(seed) / "round" / 3 / "client" / "c7"`: each step down the path is a new, independent key."""

    root: int
    path: tuple[str | int, ...] = ()

    def __truediv__(self, step: str | int) -> Key:
        return Key(self.root, (*self.path, step if isinstance(step, str) else int(step)))  # numpy's 3 is 3

    def seed(self) -> int:
        """63 bits; the type of each step is hashed with it, so 1 and "1" differ."""
        text = repr((self.root, *self.path)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1

    def generator(self) -> torch.Generator:
        """On the CPU whatever the device, so that a GPU run draws the same numbers."""
        return torch.Generator().manual_seed(self.seed())

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator())

    def poisson(self, count: int, share: float) -> Tensor:
        """The places of those drawn, of so many, each by itself with this probability."""
        draws = torch.rand(count, generator=self.generator(), dtype=torch.float64)
        return (draws < share).nonzero().flatten()

    def uniform(self) -> float:
        return random.Random(self.seed()).random()

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """Without replacement, in a keyed order; costs the sample, not the population."""
        return random.Random(self.seed()).sample(items, count)
