"""Keys: each draw is a documented function of the hash of its path."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
import torch

from partita.core import chacha
from partita.core.rng import WORDS, Key

KEY = Key(7) / "round" / 3 / "client" / "a"
TEXT = b"(7, 'round', 3, 'client', 'a')"


def test_digest_hashes_root_and_path() -> None:
    assert KEY.path == ("round", 3, "client", "a")
    for size in (1, 16, 32):
        assert KEY.digest(size) == hashlib.blake2b(TEXT, digest_size=size).digest()
    assert KEY.seed() == int.from_bytes(KEY.digest(16), "big")


def test_numpy_numbers_are_equal_to_python_numbers_in_a_path() -> None:
    assert Key(7) / np.int64(3) == Key(7) / 3
    assert (Key(7) / np.int64(3)).seed() == (Key(7) / 3).seed()


def test_uniform_has_the_leading_53_bits_of_the_digest() -> None:
    assert KEY.uniform() == int.from_bytes(KEY.digest(8), "big") // 2**11 / 2**53
    assert 0 <= KEY.uniform() < 1


@pytest.mark.parametrize("count", [0, 1, 20])
def test_permutation_sorts_expanded_words(count: int) -> None:
    words = np.frombuffer(hashlib.shake_128(TEXT).digest(8 * count), np.uint64)
    assert KEY.permutation(count).tolist() == sorted(range(count), key=lambda place: int(words[place]))


def test_permutation_keeps_the_order_of_equal_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the order would depend on the sorting algorithm of the machine."""
    monkeypatch.setattr(Key, "_expand", lambda self, size: bytes(size))
    assert KEY.permutation(100).tolist() == list(range(100))


def mersenne_state(generator: torch.Generator) -> list[int]:
    """The 624 words of torch's CPU generator, of 8 bytes each, after a header of 24 bytes."""
    return generator.get_state()[24 : 24 + 8 * WORDS].numpy().view(np.uint64).tolist()


def test_generator_state_is_filled_with_the_expanded_hash() -> None:
    """torch then draws as numpy's Mersenne Twister does from the same words."""
    words = np.frombuffer(hashlib.shake_128(TEXT).digest(4 * WORDS), np.uint32)
    assert mersenne_state(KEY.generator()) == words.tolist()
    reference = np.random.RandomState()
    reference.set_state(("MT19937", words, WORDS))
    drawn = torch.randint(0, 1000, (5,), generator=KEY.generator())
    assert drawn.tolist() == [int(word) % 1000 for word in reference.randint(0, 2**32, 5, np.uint32)]
    assert torch.equal(torch.randn(5, generator=KEY.generator()), torch.randn(5, generator=KEY.generator()))


def test_sample_is_that_of_a_python_generator_with_the_seed() -> None:
    assert KEY.sample("abcdef", 3) == random.Random(KEY.seed()).sample("abcdef", 3)


def test_poisson_returns_the_places_of_bernoulli_draws() -> None:
    drawn = chacha.bernoulli(KEY.digest(32), 50, 0.3)
    assert KEY.poisson(50, 0.3).tolist() == [place for place in range(50) if drawn[place]]
