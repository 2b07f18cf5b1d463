"""Keys for random draws: a draw depends on its path alone, not on order, block size, engine or method.

Every draw uses at least 128 bits of the hash of its path, so that two paths never share a stream. Draws on which a
privacy guarantee rests come from a stream cipher (see `chacha.py`); all others expand the hash with SHAKE-128.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from partita.core import chacha

T = TypeVar("T")

SEED_BYTES = 16
# torch's CPU generator is a Mersenne Twister that keeps 32 bits of its seed. Its state has 624 words: fill them all.
WORDS = 624
_STATE_AT = 24  # bytes before the words in the state that torch saves; each word takes 8 bytes


@dataclass(frozen=True)
class Key:
    """`Key(seed) / "round" / 3 / "client" / "c7"`: each step down the path is a new, independent key."""

    root: int = field(repr=False)  # may be a secret, so that it must not appear in a message
    path: tuple[str | int, ...] = ()

    def __truediv__(self, step: str | int) -> Key:
        return Key(self.root, (*self.path, step if isinstance(step, str) else int(step)))  # numpy's 3 is 3

    def digest(self, size: int) -> bytes:
        """The hash of the path; the type of each step is hashed with it, so 1 and "1" differ."""
        return hashlib.blake2b(self._text(), digest_size=size).digest()

    def seed(self) -> int:
        """128 bits, for generators that take a seed of that size."""
        return int.from_bytes(self.digest(SEED_BYTES), "big")

    def generator(self) -> torch.Generator:
        """On the CPU whatever the device, so that a GPU run draws the same numbers."""
        words = np.frombuffer(self._expand(4 * WORDS), np.uint32).astype(np.uint64)
        state = _fresh_state()
        state[_STATE_AT : _STATE_AT + 8 * WORDS] = torch.from_numpy(words.view(np.uint8))
        return torch.Generator().set_state(state)

    def permutation(self, count: int) -> Tensor:
        order = np.frombuffer(self._expand(8 * count), np.uint64).argsort(kind="stable")
        return torch.from_numpy(order)

    def uniform(self) -> float:
        """In [0, 1), with 53 bits."""
        return (int.from_bytes(self.digest(8), "big") >> 11) * 2.0**-53

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """Without replacement, in a keyed order; costs the sample, not the population."""
        return random.Random(self.seed()).sample(items, count)

    def poisson(self, count: int, rate: float) -> Tensor:
        """The indices drawn out of `count`, each by itself with probability `rate`. Privacy accounting relies on it."""
        return torch.from_numpy(chacha.bernoulli(self.digest(chacha.KEY_BYTES), count, rate).nonzero()[0])

    def _expand(self, size: int) -> bytes:
        return hashlib.shake_128(self._text()).digest(size)

    def _text(self) -> bytes:
        return repr((self.root, *self.path)).encode()


def _fresh_state() -> Tensor:
    return torch.Generator().manual_seed(0).get_state()
