"""The attack on noise drawn from a 32-bit seed: a server tries all seeds and subtracts the matching noise.

benchmarks/attack/guess_noise.py tries all 2**32 seeds; here the attacker knows all but 14 of the bits.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from partita.core.noise import add_noise, gaussian_noise
from partita.core.rng import Key

BITS, SIZE, SIGNAL = 14, 512, 0.01


def cosine(left: Tensor, right: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(left.double(), right.double(), dim=0))


def noise_of_seed(seed: int) -> Tensor:
    """Noise from torch's generator, as it was drawn before."""
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def release_with_seeded_noise(total: Tensor, secret: int) -> Tensor:
    return total + noise_of_seed(secret)


def release_with_keyed_noise(total: Tensor, secret: int) -> Tensor:
    return add_noise(total, gaussian_noise({"w": total}, Key(secret), 1.0)["w"], 1.0)


def subtract_guessed_noise(released: Tensor, known: int) -> Tensor | None:
    """Try every seed given 18 of its 32 bits, and return the release minus the matching noise."""
    for low in range(2**BITS):
        noise = noise_of_seed(known | low)
        if cosine(noise, released) > 0.9:
            return released - noise
    return None


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("scheme", "succeeds"), [(release_with_seeded_noise, True), (release_with_keyed_noise, False)])
def test_seed_search_recovers_seeded_noise_but_not_keyed_noise(
    scheme: Callable[[Tensor, int], Tensor], succeeds: bool
) -> None:
    total = torch.nn.functional.normalize(torch.randn(SIZE, generator=Key(8).generator()), dim=0) * SIGNAL * SIZE**0.5
    secret = secrets.randbits(63)
    released = scheme(total, secret)
    assert abs(cosine(total, released)) < 0.2, "the noise hides the sum in the release"
    found = subtract_guessed_noise(released, secret % 2**32 >> BITS << BITS)
    assert (found is not None) == succeeds
    if found is not None:
        assert cosine(total, found) > 0.999
