"""Shares of a client's two secrets that the server can check without seeing them, and each receiver by itself.

A client draws three polynomials of one degree: f of its seed, g of its private mask key, and r, a random one. For each
member v of its group it publishes hashes of f(v), g(v) and r(v), and it seals the three for v. S and Y, the points of
the secrets, are in the roster, and r(0) is published as the point B. A hash of all that gives two challenges, a and b,
that nobody can choose. The client answers with the polynomial z = a f + b g + r.

- The server checks that z(0) G = a S + b Y + B, so f(0) and g(0) are the secrets of the roster.
- v checks its three values against the hashes and against z(v), so all that do have values of such polynomials.
- r is random, so z says nothing about f and g. Of v's values, only f(v) or g(v) is ever released, and the server checks
  it against its hash. r(v) is not: with it and f(v), z(v) would give g(v).

Values are uniform numbers of 256 bits, so hashes need no salt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from partita.secure_aggregation.curve import NUMBER_BYTES, ORDER, POINT_BYTES, is_sum, new_number, public_point
from partita.secure_aggregation.encoding import ProtocolError, read_message, read_name, records, write_message
from partita.secure_aggregation.secret_sharing import draw, value

HASH_BYTES = 32
KINDS = (b"s", b"k", b"r")  # of the seed, of the key, random
VALUES_BYTES = len(KINDS) * NUMBER_BYTES


def hash_of(context: bytes, dealer: str, receiver: str, kind: bytes, share: bytes) -> bytes:
    """Return the hash to which a dealer commits for one value."""
    fields = [context, dealer.encode(), receiver.encode(), kind, share]
    return hashlib.sha256(write_message("H", fields)).digest()


@dataclass(frozen=True)
class Dealing:
    """What a client publishes to share its secrets.

    Attributes:
        blind: The point B.
        answer: The terms of z.
        hashes: By member of the group, itself too, the three hashes in a row.
        sealed: By neighbor, its three values, encrypted.
    """

    blind: bytes
    answer: tuple[int, ...]
    hashes: Mapping[str, bytes]
    sealed: Mapping[str, bytes]

    def to_bytes(self) -> bytes:
        """Encode the message."""
        rows = [
            field
            for name in sorted(self.hashes)
            for field in (name.encode(), self.hashes[name], self.sealed.get(name, b""))
        ]
        return write_message("E", [self.blind, b"".join(map(_bytes, self.answer)), *rows])

    @staticmethod
    def from_bytes(data: bytes, group: Sequence[str], threshold: int) -> Dealing:
        """Decode the message.

        Raises:
            ProtocolError: If it is not a dealing for these clients.
        """
        fields = read_message("E", data)
        if len(fields) < 2 or len(fields[0]) != POINT_BYTES or len(fields[1]) != threshold * NUMBER_BYTES:
            raise ProtocolError("a message with shares has no proof, or one of another size")
        rows = list(records("E", fields[2:], (None, len(KINDS) * HASH_BYTES, None)))
        if [read_name(name) for name, _, _ in rows] != sorted(group):
            raise ProtocolError(f"it has shares for {len(rows)} clients, which are not just its group")
        terms = [fields[1][place : place + NUMBER_BYTES] for place in range(0, len(fields[1]), NUMBER_BYTES)]
        return Dealing(
            fields[0],
            tuple(int.from_bytes(term, "big") for term in terms),
            {read_name(name): hashes for name, hashes, _ in rows},
            {read_name(name): sealed for name, _, sealed in rows if sealed},
        )

    def challenge(self, dealer: str, about: bytes) -> bytes:
        """Return the challenges a and b in a row. `about` is of the round and its roster."""
        hashes = [field for name in sorted(self.hashes) for field in (name.encode(), self.hashes[name])]
        return hashlib.sha256(write_message("Z", [about, dealer.encode(), self.blind, *hashes])).digest()

    def proves(self, dealer: str, about: bytes, seed_point: bytes, key_point: bytes) -> bool:
        """Return whether the shared secrets are those of the roster, if the receivers' values are right."""
        a, b = _numbers(self.challenge(dealer, about))
        try:
            return is_sum(self.answer[0], [(a, seed_point), (b, key_point), (1, self.blind)])
        except ProtocolError:  # B is no point
            return False

    def value(self, position: int) -> bytes:
        """Return z at a receiver's position."""
        return _bytes(value(self.answer, position))


def deal(
    dealer: str,
    group: Sequence[str],
    threshold: int,
    secrets: tuple[bytes, bytes],
    context: bytes,
    about: bytes,
    seal: Callable[[str, bytes], bytes],
) -> tuple[Dealing, bytes]:
    """Share a seed and a private mask key.

    Args:
        dealer: The client.
        group: The client and its neighbors, sorted.
        threshold: The number of shares that give a secret.
        secrets: The seed and the key.
        context: The context of the round.
        about: The context and the digest of the roster.
        seal: Encrypts bytes for a neighbor.

    Returns:
        The dealing, and the dealer's own share of its seed.
    """
    blind = new_number()
    polynomials = [draw(int.from_bytes(secret, "big"), threshold) for secret in (*secrets, blind)]
    shares = {
        name: [_bytes(value(terms, place)) for terms in polynomials] for place, name in enumerate(sorted(group), 1)
    }
    hashes = {
        name: b"".join(hash_of(context, dealer, name, kind, share) for kind, share in zip(KINDS, each, strict=True))
        for name, each in shares.items()
    }
    sealed = {name: seal(name, b"".join(each)) for name, each in shares.items() if name != dealer}
    first = Dealing(public_point(blind), (), hashes, sealed)
    a, b = _numbers(first.challenge(dealer, about))
    answer = tuple((a * seed + b * key + free) % ORDER for seed, key, free in zip(*polynomials, strict=True))
    return Dealing(first.blind, answer, hashes, sealed), shares[dealer][0]


def check_values(
    values: bytes, hashes: bytes, challenge: bytes, answer: bytes, names: tuple[str, str], context: bytes
) -> bool:
    """Return whether a receiver's values are those that the dealer published.

    Args:
        values: The three values in a row.
        hashes: Their hashes.
        challenge: The challenges.
        answer: z at the receiver's position.
        names: Dealer and receiver.
        context: The context of the round.
    """
    if len(values) != VALUES_BYTES:
        return False
    shares = [values[place : place + NUMBER_BYTES] for place in range(0, VALUES_BYTES, NUMBER_BYTES)]
    found = b"".join(hash_of(context, *names, kind, share) for kind, share in zip(KINDS, shares, strict=True))
    seed, key, free = (int.from_bytes(share, "big") for share in shares)
    a, b = _numbers(challenge)
    return found == hashes and max(seed, key, free) < ORDER and _bytes((a * seed + b * key + free) % ORDER) == answer


def _numbers(challenge: bytes) -> tuple[int, int]:
    half = len(challenge) // 2
    return int.from_bytes(challenge[:half], "big"), int.from_bytes(challenge[half:], "big")


def _bytes(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")
