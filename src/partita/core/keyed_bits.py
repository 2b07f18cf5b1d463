"""Random words for single elements of a batch, as a function of seed, place and coordinates.

Dropout and augmentation draw from these. A word depends on the seed of its example, on the place in the model, and on
the coordinates of the element. It does not depend on padding, batch size, order, engine or device. All operations are
plain integer arithmetic on int32, which wraps, so that they work under `vmap`, `torch.compile` and in CUDA graphs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from partita.core.rng import Key

# The multipliers of lowbias32, a hash in which every bit of the input changes every bit of the output equally often.
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32
_GOLDEN_64 = np.uint64(0x9E3779B97F4A7C15)  # the increment of splitmix64


def example_seeds(keys: Sequence[Key], step: int, examples: torch.Tensor) -> torch.Tensor:
    """Return a seed for each example of a step, of shape (client, example).

    A seed depends on which example it is for, not on its place in the batch: for differential privacy, the draws of an
    example must not depend on which others are in the batch.

    Args:
        keys: The key of each client, round and phase.
        step: The step of the phase, from 0.
        examples: The index of each example among those of its client, (client, example) or (example,).
    """
    places = examples.cpu().numpy().astype(np.uint64)
    start = np.array([[int.from_bytes(key.digest(8), "big")] for key in keys], np.uint64)
    with np.errstate(over="ignore"):  # the arithmetic of splitmix64 wraps
        of_step = _splitmix64(start + np.uint64(step) * _GOLDEN_64)
        seeds = _splitmix64(of_step + (places + np.uint64(1)) * _GOLDEN_64)
    return torch.from_numpy(seeds.view(np.int64))


def _splitmix64(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def place_id(name: str) -> int:
    """Return the 64-bit id of a place in the model, such as the path of a dropout layer."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def place_tensor(place: int) -> torch.Tensor:
    """Return a place as an int64 tensor with the same bits, for a program that serves several places."""
    return torch.tensor((place + 2**63) % 2**64 - 2**63)


def random_words(seeds: torch.Tensor, place: int | torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return uniform random int32 words.

    Args:
        seeds: The seed of each example, int64 of shape (example,).
        place: The id of the place, from `place_id`, or the same as a tensor.
        sizes: The sizes of the dimensions after the example.

    Returns:
        Shape (example, *sizes). Use the high bits; the low ones are less random.
    """
    words = _mixed(seeds.to(torch.int32) ^ _low_bits(place))
    words = _mixed(words ^ (seeds >> 32).to(torch.int32) ^ _low_bits(place >> 32))  # (example,)
    for depth, size in enumerate(sizes):
        coordinates = torch.arange(size, dtype=torch.int32, device=seeds.device)
        joined = words.unsqueeze(-1) ^ _mixed(coordinates + _signed((depth + 1) * 0x9E3779B9))
        # The last mix has no final shift, which only changes the low bits: it is the only one on all elements.
        words = _mixed(joined) if depth < len(sizes) - 1 else _half_mixed(joined)
    return words


def keep_factors(words: torch.Tensor, rate: float, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 with probability `rate`, otherwise 1 / (1 - rate), for each word."""
    if rate >= 1:
        return torch.zeros_like(words, dtype=dtype)
    return (words >= round(rate * 2**32) - 2**31).to(dtype) * (1 / (1 - rate))


def uniforms(words: torch.Tensor) -> torch.Tensor:
    """Return the words as uniform float32 numbers in [0, 1), with 24 bits."""
    return ((words >> 8) & 0xFFFFFF).float() * 2.0**-24


def _mixed(words: torch.Tensor) -> torch.Tensor:
    words = _half_mixed(words ^ _shifted(words, 16))
    return words ^ _shifted(words, 16)


def _half_mixed(words: torch.Tensor) -> torch.Tensor:
    words = _times(words, _FIRST)
    return _times(words ^ _shifted(words, 15), _SECOND)


def _times(words: torch.Tensor, factor: int) -> torch.Tensor:
    """Multiply and keep the lowest 32 bits."""
    if torch.compiler.is_compiling():  # the compiler's C++ may not assume that int32 wraps; it fuses the casts
        return (words.long() * factor).to(torch.int32)
    return words * factor


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right and fill with zeros; `>>` alone would copy the sign."""
    return (words >> bits) & ((1 << (32 - bits)) - 1)


def _low_bits(number: int | torch.Tensor) -> int | torch.Tensor:
    return number.to(torch.int32) if isinstance(number, torch.Tensor) else _signed(number)


def _signed(number: int) -> int:
    """Return the lowest 32 bits of a number as an int32."""
    return (number + 2**31) % 2**32 - 2**31
