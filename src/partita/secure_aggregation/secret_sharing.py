"""Shamir's secret sharing of 32-byte secrets: any `threshold` shares give the secret, and fewer say nothing about it.

A share is the value of a random polynomial over a prime field. Its constant term is the secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

from partita.secure_aggregation.encoding import ProtocolError

PRIME = 2**256 + 297  # the smallest prime above all 32-byte secrets
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(secret: bytes, count: int, threshold: int) -> list[bytes]:
    """Split a secret.

    Args:
        secret: 32 bytes.
        count: The number of shares.
        threshold: The number of shares that give the secret.

    Returns:
        The shares of positions 1 to `count`.
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= count:
        raise ValueError(f"cannot split {len(secret)} bytes into {count} shares, {threshold} of which give the secret")
    terms = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [_value(terms, position).to_bytes(SHARE_BYTES, "big") for position in range(1, count + 1)]


def recover(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Return the secret from shares by position.

    A wrong share gives wrong bytes, or none at all. The caller must check the secret, which both secrets of the
    protocol allow: a private key against its public key, and a seed against its commitment.

    Args:
        shares: At least `threshold` shares by position.
        threshold: The number of shares that give the secret.

    Raises:
        ProtocolError: If there are too few shares, or if they do not give 32 bytes.
    """
    if len(shares) < threshold:
        raise ProtocolError(f"{len(shares)} shares of a secret arrived, and {threshold} are needed")
    positions = tuple(sorted(shares)[:threshold])
    total = sum(
        factor * int.from_bytes(shares[position], "big")
        for position, factor in zip(positions, _factors(positions), strict=True)
    )
    secret = total % PRIME
    if secret >= 2 ** (8 * SECRET_BYTES):
        raise ProtocolError("the shares of a secret do not fit together; at least one is wrong")
    return secret.to_bytes(SECRET_BYTES, "big")


def _value(terms: Sequence[int], position: int) -> int:
    value = 0
    for term in reversed(terms):
        value = (value * position + term) % PRIME
    return value


@lru_cache(maxsize=1024)  # most secrets of a round are recovered from the shares of the same positions
def _factors(positions: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's factors of the values at `positions`, for the value at 0."""
    factors = []
    for place in positions:
        above = below = 1
        for other in positions:
            if other != place:
                above, below = above * other % PRIME, below * (other - place) % PRIME
        factors.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(factors)
