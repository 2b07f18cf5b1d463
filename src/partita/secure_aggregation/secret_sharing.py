"""Shamir's secret sharing of numbers: any `threshold` shares give the secret, and fewer say nothing about it.

A share is the value of a random polynomial over a prime field. Its constant term is the secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

from partita.secure_aggregation.curve import NUMBER_BYTES, ORDER
from partita.secure_aggregation.encoding import ProtocolError


def draw(secret: int, threshold: int) -> list[int]:
    """Draw a polynomial with this secret, any `threshold` values of which give it."""
    return [secret, *(secrets.randbelow(ORDER) for _ in range(threshold - 1))]


def value(terms: Sequence[int], position: int) -> int:
    """Return the value of a polynomial at a position: a share."""
    found = 0
    for term in reversed(terms):
        found = (found * position + term) % ORDER
    return found


def recover(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Return the secret from shares by position, all of which must be right.

    Args:
        shares: At least `threshold` shares by position.
        threshold: The number of shares that give the secret.

    Raises:
        ProtocolError: If there are too few shares.
    """
    if len(shares) < threshold:
        raise ProtocolError(f"{len(shares)} shares of a secret arrived, and {threshold} are needed")
    positions = tuple(sorted(shares)[:threshold])
    total = sum(
        factor * int.from_bytes(shares[position], "big")
        for position, factor in zip(positions, _factors(positions), strict=True)
    )
    return (total % ORDER).to_bytes(NUMBER_BYTES, "big")


@lru_cache(maxsize=1024)  # most secrets of a round are recovered from the shares of the same positions
def _factors(positions: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's factors of the values at `positions`, for the value at 0."""
    factors = []
    for place in positions:
        above = below = 1
        for other in positions:
            if other != place:
                above, below = above * other % ORDER, below * (other - place) % ORDER
        factors.append(above * pow(below, -1, ORDER) % ORDER)
    return tuple(factors)
