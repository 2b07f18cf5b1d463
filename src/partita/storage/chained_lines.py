"""Append-only files of JSON lines, each with its number, the hash of the line before it and its own hash.

A line that is changed, removed or moved breaks the chain. Lines cut off at the end cannot be noticed from the file
alone, and someone who may write the file can write another chain: the newest hash must be noted somewhere else.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from partita.storage import atomic_files

START = "0" * 64  # what stands for the hash of the line before the first
Line = Mapping[str, Any]


@dataclass(frozen=True)
class ChainedLines:
    """A file of chained lines.

    Attributes:
        path: The file.
        error: What to raise if the file is not what was written.
    """

    path: Path
    error: type[ValueError]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing. The folder must exist."""
        with FileLock(self.path.with_suffix(".lock"), poll_interval=0.01, fallback_to_soft=False):
            yield

    def read(self) -> tuple[list[Line], bytes]:
        """Return the complete lines, and the bytes of an incomplete one that a killed process left at the end.

        Raises:
            error: If a line is not the one that was written. The message names the first such line.
        """
        lines: list[Line] = []
        if not self.path.exists():
            return lines, b""
        for raw in atomic_files.lines(self.path):
            if not raw.endswith(b"\n"):
                return lines, raw
            lines.append(self._checked(raw, lines[-1] if lines else None))
        return lines, b""

    def append(self, last: Line | None, *contents: Line) -> list[Line]:
        """Add lines after the last one. They are on disk when this function returns.

        Args:
            last: The last line of the file, None if it has none. The caller holds the lock.
            contents: What the lines say, as JSON can hold it.

        Returns:
            The new lines.

        Raises:
            DiskError: If they cannot be written.
        """
        added: list[Line] = []
        data = b""
        for content in contents:
            line = {**content, "line": last["line"] + 1 if last else 1, "previous": last["hash"] if last else START}
            body = json.dumps(line, sort_keys=True, separators=(",", ":")).encode()[:-1]
            data += body + _end(_hash(body))
            added.append(last := {**line, "hash": _hash(body)})
        if data:
            atomic_files.append(self.path, data)
        return added

    def cut(self, torn: bytes) -> None:
        """Remove an incomplete line from the end of the file."""
        with open(self.path, "r+b") as file:
            file.truncate(self.path.stat().st_size - len(torn))
            os.fsync(file.fileno())

    def _checked(self, raw: bytes, last: Line | None) -> Line:
        number = last["line"] + 1 if last else 1
        body, end = raw[: -len(_end(START))], raw[-len(_end(START)) :]
        # The hash is over the bytes as they were written: a change that JSON ignores is a change.
        if end != _end(_hash(body)):
            raise self.error(f"{self.path}, line {number} was changed: its hash does not fit; compare it with a copy")
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            line = {}
        if (
            not isinstance(line, dict)
            or line.get("previous") != (last["hash"] if last else START)
            or line.get("line") != number
        ):
            raise self.error(
                f"{self.path}, line {number} does not follow from the line before it: lines were removed, added or "
                "moved; compare it with a copy"
            )
        return line


def _hash(body: bytes) -> str:
    """Return the hash of a line, of all its bytes before the hash."""
    return hashlib.sha256(body).hexdigest()


def _end(hash_of_line: str) -> bytes:
    """Return the end of a line, which holds its hash."""
    return b',"hash":"' + hash_of_line.encode() + b'"}\n'
