"""The byte format of the protocol's messages: a kind, a version, and fields with their lengths. Nothing is pickled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

VERSION = 1
LENGTH_BYTES = 4
MAX_NAME = 1024  # bytes of a client's name


class ProtocolError(ValueError):
    """A message or a request breaks the protocol of secure aggregation."""


class TooFewClients(ProtocolError):
    """Fewer clients are left than the threshold, so nothing can be unmasked."""


def write_message(kind: str, fields: Sequence[bytes]) -> bytes:
    """Encode fields as one message.

    Args:
        kind: One letter that names the kind of message.
        fields: The fields in order.
    """
    parts = [kind.encode("ascii"), bytes([VERSION])]
    for field in fields:
        parts += [len(field).to_bytes(LENGTH_BYTES, "little"), field]
    return b"".join(parts)


def read_message(kind: str, data: bytes) -> list[bytes]:
    """Return the fields of a message.

    Raises:
        ProtocolError: If the bytes are not a message of this kind.
    """
    if data[:1] != kind.encode("ascii") or data[1:2] != bytes([VERSION]):
        raise ProtocolError(f"expected a message of kind '{kind}', version {VERSION}, but got {bytes(data[:2])!r}")
    fields, place = [], 2
    while place < len(data):
        start = place + LENGTH_BYTES
        place = start + int.from_bytes(data[place:start], "little")
        if start > len(data) or place > len(data):
            raise ProtocolError(f"a message of kind '{kind}' is cut short")
        fields.append(bytes(data[start:place]))
    return fields


def records(kind: str, fields: Sequence[bytes], sizes: Sequence[int | None]) -> Iterator[tuple[bytes, ...]]:
    """Group fields into records and check the length of each field.

    Args:
        kind: The kind of message, for errors.
        fields: The fields of all records.
        sizes: The length of each field of a record; None for any.

    Raises:
        ProtocolError: If a record is incomplete, or if a field has another length.
    """
    if len(fields) % len(sizes):
        raise ProtocolError(f"a message of kind '{kind}' ends within a record")
    for start in range(0, len(fields), len(sizes)):
        record = tuple(fields[start : start + len(sizes)])
        if any(size is not None and len(field) != size for field, size in zip(record, sizes, strict=True)):
            raise ProtocolError(f"a message of kind '{kind}' has a field of the wrong length")
        yield record


def read_name(field: bytes) -> str:
    """Return a client's name.

    Raises:
        ProtocolError: If it is empty, too long, or not UTF-8.
    """
    try:
        name = field.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ProtocolError("a client's name is not UTF-8") from error
    if not 0 < len(field) <= MAX_NAME:
        raise ProtocolError(f"a client's name has {len(field)} bytes; it must have 1 to {MAX_NAME}")
    return name
