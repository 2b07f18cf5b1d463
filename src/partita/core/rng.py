"""Keys for random draws: a draw depends only on its path, not on the order of draws, block size, engine or method.

Every draw uses at least 128 bits of the hash of its path, so two paths never share a stream. Draws that a privacy
guarantee depends on come from a stream cipher (see `chacha.py`); all others expand the hash with SHAKE-128.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from partita.core import chacha

T = TypeVar("T")

SEED_BYTES = 16
# torch's CPU generator is a Mersenne Twister that uses only 32 bits of its seed. So fill all 624 words of its state.
WORDS = 624
_STATE_AT = 24  # offset in bytes of the words in torch's saved state; each word takes 8 bytes


@dataclass(frozen=True)
class Key:
    """A random key with a path: `Key(seed) / "round" / 3 / "client" / "c7"`. Each step gives a new, independent key."""

    root: int = field(repr=False)  # may be a secret, so it must not appear in messages
    path: tuple[str | int, ...] = ()

    def __truediv__(self, step: str | int) -> Key:
        return Key(self.root, (*self.path, step if isinstance(step, str) else int(step)))  # numpy's 3 is 3

    def digest(self, size: int) -> bytes:
        """Return `size` bytes of the hash of root and path. Types count: the steps 1 and "1" differ."""
        return hashlib.blake2b(self._text(), digest_size=size).digest()

    def seed(self) -> int:
        """Return a 128-bit seed, for generators that accept one."""
        return int.from_bytes(self.digest(SEED_BYTES), "big")

    def generator(self) -> torch.Generator:
        """Return a torch generator. It is always on the CPU, so that a GPU run draws the same numbers."""
        words = np.frombuffer(self._expand(4 * WORDS), np.uint32).astype(np.uint64)
        state = torch.Generator().get_state()
        state[_STATE_AT : _STATE_AT + 8 * WORDS] = torch.from_numpy(words.view(np.uint8))
        return torch.Generator().set_state(state)

    def permutation(self, count: int) -> torch.Tensor:
        """Return a random permutation of `range(count)`, of shape (count,)."""
        order = np.frombuffer(self._expand(8 * count), np.uint64).argsort(kind="stable")
        return torch.from_numpy(order)

    def uniform(self) -> float:
        """Return a uniform random number in [0, 1) with 53 bits."""
        return (int.from_bytes(self.digest(8), "big") >> 11) * 2.0**-53

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """Draw `count` items without replacement, in random order. The cost grows with `count`, not `len(items)`."""
        return random.Random(self.seed()).sample(items, count)

    def poisson(self, count: int, rate: float) -> torch.Tensor:
        """Draw from `range(count)`, each index independently with probability `rate`.

        Privacy accounting relies on these draws.

        Returns:
            The drawn indices in increasing order, of shape (drawn,).
        """
        return torch.from_numpy(chacha.bernoulli(self.digest(chacha.KEY_BYTES), count, rate).nonzero()[0])

    def _expand(self, size: int) -> bytes:
        return hashlib.shake_128(self._text()).digest(size)

    def _text(self) -> bytes:
        return repr((self.root, *self.path)).encode()


@contextmanager
def seeded(key: Key) -> Iterator[None]:
    """Seed torch's global CPU generator inside the block, because modules draw their weights from it.

    Not torch.manual_seed: it would also reseed the GPUs.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.set_state(key.generator().get_state())
        yield
