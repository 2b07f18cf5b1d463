"""The messages of the six stages, as bytes.

| stage | client to server | server to client |
|---|---|---|
| advertise | `Advertisement` | `Roster`: all advertisements |
| share keys | `Dealing`: sealed shares by receiver | `Parcel` of each neighbor |
| check | a signed report of the neighbors whose shares are wrong | `Stayed`: who shared keys |
| masked input | the masked vector | `Stayed`: also whose vector arrived |
| confirm | a signature of that | all signatures |
| unmask | `UnmaskedShares` | |
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from partita.core import serialization
from partita.secure_aggregation.curve import NUMBER_BYTES, POINT_BYTES
from partita.secure_aggregation.dealing import HASH_BYTES, KINDS
from partita.secure_aggregation.encoding import ProtocolError, read_message, read_name, records, write_message
from partita.secure_aggregation.key_agreement import KEY_BYTES

T = TypeVar("T")
Sign = Callable[[bytes], bytes]  # message -> signature
Verify = Callable[[str, bytes, bytes], bool]  # client, message, signature -> whether it is the client's
VECTOR = "masked"
SHARED, MASKED = 1, 2  # how far a client came; 0: it shared no keys
SEED, KEY = KINDS[:2]  # kinds of shares: of the seed of a client's own mask, and of its private mask key


@dataclass(frozen=True)
class Advertisement:
    """A client's public values.

    Attributes:
        client: The client's name.
        cipher_key: The public key with which others encrypt shares for this client.
        mask_key: The public point from which masks are agreed on.
        commitment: The public point of the seed of its own mask, against which the recovered seed is checked.
        signature: The client's signature of all that; empty without signatures.
    """

    client: str
    cipher_key: bytes
    mask_key: bytes
    commitment: bytes
    signature: bytes = b""

    def signed_part(self, context: bytes) -> bytes:
        """Return the bytes that the signature covers. They include the round."""
        return write_message("S", [context, *self.fields()[:-1]])

    def fields(self) -> list[bytes]:
        """Return the fields of the encoded message."""
        return [self.client.encode(), self.cipher_key, self.mask_key, self.commitment, self.signature]

    def to_bytes(self) -> bytes:
        """Encode the message."""
        return write_message("A", self.fields())

    @staticmethod
    def from_bytes(data: bytes) -> Advertisement:
        """Decode the message."""
        found = _advertisements("A", data)
        if len(found) != 1:
            raise ProtocolError(f"a message advertises the keys of {len(found)} clients, not of one")
        return found[0]


def write_roster(advertisements: Mapping[str, Advertisement]) -> bytes:
    """Encode all advertisements of a round, sorted by name."""
    return write_message("R", [field for name in sorted(advertisements) for field in advertisements[name].fields()])


def read_roster(data: bytes) -> dict[str, Advertisement]:
    """Decode all advertisements of a round.

    Raises:
        ProtocolError: If names are not sorted and distinct, or if two public keys are equal.
    """
    found = _advertisements("R", data)
    names = [each.client for each in found]
    if names != sorted(set(names)):
        raise ProtocolError("the clients of a roster are not sorted, or one is listed twice")
    keys = [key for each in found for key in (each.cipher_key, each.mask_key)]
    if len(set(keys)) != len(keys):
        raise ProtocolError("two public keys of a roster are equal; each must be drawn at random by its client")
    return dict(zip(names, found, strict=True))


def _advertisements(kind: str, data: bytes) -> list[Advertisement]:
    sizes = (None, KEY_BYTES, POINT_BYTES, POINT_BYTES, None)
    return [Advertisement(read_name(name), *rest) for name, *rest in records(kind, read_message(kind, data), sizes)]


@dataclass(frozen=True)
class Parcel:
    """What a client gets of a neighbor's dealing.

    Attributes:
        hashes: The hashes of the client's three values.
        challenge: The challenges.
        answer: The value of the dealer's answer at the client's position.
        sealed: The three values, encrypted.
    """

    hashes: bytes
    challenge: bytes
    answer: bytes
    sealed: bytes


def write_inbox(parcels: Mapping[str, Parcel]) -> bytes:
    """Encode a client's parcels by sender."""
    rows = ((name.encode(), *vars(parcels[name]).values()) for name in sorted(parcels))
    return write_message("I", [field for row in rows for field in row])


def read_inbox(data: bytes) -> dict[str, Parcel]:
    """Decode a client's parcels by sender.

    Raises:
        ProtocolError: If a client is listed twice.
    """
    sizes = (None, len(KINDS) * HASH_BYTES, HASH_BYTES, NUMBER_BYTES, None)
    rows = records("I", read_message("I", data), sizes)
    return _distinct([(read_name(name), Parcel(*fields)) for name, *fields in rows])


@dataclass(frozen=True)
class Report:
    """Which neighbors' shares a client cannot use.

    Attributes:
        wrong: The neighbors.
        signature: The client's signature of that; empty without signatures.
    """

    wrong: frozenset[str]
    signature: bytes = b""

    def signed_part(self, context: bytes, roster: bytes) -> bytes:
        """Return the bytes that the signature covers. They include the round and all keys of its roster."""
        return write_message("G", [context, hashlib.sha256(roster).digest(), *self._names()])

    def to_bytes(self) -> bytes:
        """Encode the message."""
        return write_message("X", [self.signature, *self._names()])

    @staticmethod
    def from_bytes(data: bytes) -> Report:
        """Decode the message."""
        fields = read_message("X", data)
        if not fields:
            raise ProtocolError("a report has no signature")
        return Report(frozenset(map(read_name, fields[1:])), fields[0])

    def _names(self) -> list[bytes]:
        return [name.encode() for name in sorted(self.wrong)]


def write_vector(vector: torch.Tensor) -> bytes:
    """Encode a masked vector."""
    return serialization.save({VECTOR: vector})


def read_vector(data: bytes, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Decode a masked vector.

    Raises:
        ProtocolError: If it is not one vector of this length and type.
    """
    try:
        found = serialization.load(data)
    except Exception as error:  # safetensors has its own error type, and the bytes can be anything
        raise ProtocolError(f"a masked vector cannot be read: {str(error)[:200]}") from error
    vector = found.get(VECTOR)
    if vector is None or len(found) != 1 or vector.dtype != dtype or tuple(vector.shape) != (length,):
        shown = {name[:50]: (value.dtype, tuple(value.shape)) for name, value in list(found.items())[:3]}
        raise ProtocolError(f"a masked vector is {shown}; it must be '{VECTOR}', {dtype}, of shape ({length},)")
    return vector


@dataclass(frozen=True)
class Stayed:
    """Which clients of the roster stayed for how long. All clients of a round must get the same lists.

    Attributes:
        shared: Clients whose shares were passed on.
        masked: Those of them whose masked vector arrived.
    """

    shared: frozenset[str]
    masked: frozenset[str]

    def to_bytes(self, roster: Iterable[str]) -> bytes:
        """Encode the message: one byte for each client of the roster, sorted."""
        marks = ((name in self.shared) + (name in self.masked) for name in sorted(roster))
        return write_message("L", [bytes(marks)])

    @staticmethod
    def from_bytes(data: bytes, roster: Collection[str]) -> Stayed:
        """Decode the message.

        Raises:
            ProtocolError: If it does not say one of three things of each client of the roster.
        """
        fields = read_message("L", data)
        if len(fields) != 1 or len(fields[0]) != len(roster) or max(fields[0]) > MASKED:
            raise ProtocolError(f"the lists of clients that stayed are not about the {len(roster)} of the roster")
        marks = list(zip(sorted(roster), fields[0], strict=True))
        return Stayed(*(frozenset(name for name, mark in marks if mark >= least) for least in (SHARED, MASKED)))

    def signed_part(self, context: bytes, roster: bytes) -> bytes:
        """Return the bytes that a client signs. They include the round and all keys of its roster."""
        lists = self.to_bytes(read_roster(roster))
        return write_message("F", [context, hashlib.sha256(roster).digest(), lists])


def write_signatures(signatures: Mapping[str, bytes], masked: Iterable[str]) -> bytes:
    """Encode the signatures of those whose vector arrived, sorted by name; empty ones of those that sent none."""
    return write_message("V", [signatures.get(name, b"") for name in sorted(masked)])


def read_signatures(data: bytes, masked: Collection[str]) -> dict[str, bytes]:
    """Decode the signatures of those whose vector arrived.

    Raises:
        ProtocolError: If there is not one field for each of them.
    """
    fields = read_message("V", data)
    if len(fields) != len(masked):
        raise ProtocolError(f"there are {len(fields)} signatures of {len(masked)} clients")
    return dict(zip(sorted(masked), fields, strict=True))


@dataclass(frozen=True)
class UnmaskedShares:
    """A client's shares of the secrets that the server asked for.

    Attributes:
        seeds: By survivor, the share of its seed.
        keys: By dropped client, the share of its private mask key.
    """

    seeds: Mapping[str, bytes]
    keys: Mapping[str, bytes]

    def to_bytes(self) -> bytes:
        """Encode the message."""
        rows = [(SEED, name, share) for name, share in self.seeds.items()]
        rows += [(KEY, name, share) for name, share in self.keys.items()]
        return write_message("U", [field for kind, name, share in rows for field in (kind, name.encode(), share)])

    @staticmethod
    def from_bytes(data: bytes) -> UnmaskedShares:
        """Decode the message."""
        rows = list(records("U", read_message("U", data), (1, None, NUMBER_BYTES)))
        shares = _distinct([(read_name(name), (kind, share)) for kind, name, share in rows])
        seeds, keys = ({name: share for name, (of, share) in shares.items() if of == kind} for kind in (SEED, KEY))
        return UnmaskedShares(seeds, keys)


def _distinct(pairs: list[tuple[str, T]]) -> dict[str, T]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ProtocolError("a message lists a client twice")
    return found
