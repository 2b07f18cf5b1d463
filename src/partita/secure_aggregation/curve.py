"""The curve P-256: keys whose private half is a number of a prime field, so that it can be shared and checked.

Private numbers are used by `cryptography` only. The sums of points here are of public ones, and may take a time that
depends on them.
"""

from __future__ import annotations

import secrets
from typing import Any

from partita.secure_aggregation.encoding import ProtocolError
from partita.secure_aggregation.key_agreement import derive, need

FIELD = 2**256 - 2**224 + 2**192 + 2**96 - 1  # of the coordinates
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # the number of points, a prime
NUMBER_BYTES = 32
POINT_BYTES = 33  # compressed
Point = tuple[int, int] | None  # None is zero


def new_number() -> bytes:
    """Draw a private number from the operating system."""
    return (1 + secrets.randbelow(ORDER - 1)).to_bytes(NUMBER_BYTES, "big")


def public_point(number: bytes) -> bytes:
    """Return the public point of a private number, compressed.

    Raises:
        ProtocolError: If the number is 0 or too large.
    """
    return _encode(_private(number).public_key())


def agree_on(number: bytes, point: bytes, context: bytes, purpose: str) -> bytes:
    """Return the 32-byte key that the owners of two numbers share; see `agree`."""
    parts = need()
    return derive(_private(number).exchange(parts.ec.ECDH(), _public(point)), context, purpose)


def check_point(data: bytes) -> None:
    """Check that bytes are a point.

    Raises:
        ProtocolError: If they are not.
    """
    _public(data)


def is_sum(number: int, terms: list[tuple[int, bytes]]) -> bool:
    """Return whether `number` times the base point is the sum of the points times their factors."""
    total: Point = None
    for factor, point in terms:
        found = _public(point).public_numbers()
        total = add(total, times(factor, (found.x, found.y)))
    if not number % ORDER or total is None:
        return not number % ORDER and total is None
    found = _private((number % ORDER).to_bytes(NUMBER_BYTES, "big")).public_key().public_numbers()
    return (found.x, found.y) == total


def add(one: Point, other: Point) -> Point:
    """Return the sum of two points."""
    if one is None or other is None:
        return one or other
    (x, y), (u, v) = one, other
    if x == u and (y + v) % FIELD == 0:
        return None
    slope = (3 * (x * x - 1) * pow(2 * y, -1, FIELD) if x == u else (v - y) * pow(u - x, -1, FIELD)) % FIELD
    third = (slope * slope - x - u) % FIELD
    return third, (slope * (x - third) - y) % FIELD


def times(factor: int, point: Point) -> Point:
    """Return a point times a number that is not negative."""
    total: Point = None
    for bit in bin(factor)[2:]:
        total = add(total, total)
        total = add(total, point) if bit == "1" else total
    return total


def _private(number: bytes) -> Any:
    parts = need()
    try:
        return parts.ec.derive_private_key(int.from_bytes(number, "big"), parts.ec.SECP256R1())
    except ValueError as error:
        raise ProtocolError("a private number is not one of P-256") from error


def _public(point: bytes) -> Any:
    parts = need()
    try:
        return parts.ec.EllipticCurvePublicKey.from_encoded_point(parts.ec.SECP256R1(), point)
    except ValueError as error:
        raise ProtocolError("a public key is not a point of P-256") from error


def _encode(public: Any) -> bytes:
    form = need().serialization
    encoded: bytes = public.public_bytes(form.Encoding.X962, form.PublicFormat.CompressedPoint)
    return encoded
