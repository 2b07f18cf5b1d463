"""A site's log of what left it: one JSON line per event, each with the hash of the line before it.

A line that is changed, removed or moved breaks the chain. Lines cut off at the end cannot be noticed from the file
alone, so the newest hash, the head, should be noted somewhere else.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from partita.storage import atomic_files

FILE = "log.jsonl"
START = "0" * 64  # what stands for the hash of the line before the first
Line = Mapping[str, Any]


class LogError(ValueError):
    """The log is not what was written. Nothing may leave until someone has looked at it."""


@dataclass(frozen=True)
class SiteLog:
    """The log of a site.

    Attributes:
        path: The file.
    """

    path: Path

    def append(self, kind: str, **fields: Any) -> Line:
        """Add a line. It is on disk when this function returns.

        A last line that a killed process left incomplete is moved to a file of its own, and a line says so.

        Args:
            kind: What happened, such as "left" or "refused".
            fields: What the line says, as JSON can hold it.

        Returns:
            The line.

        Raises:
            LogError: If the log is damaged.
            DiskError: If the line cannot be written.
        """
        with self._locked():
            lines, torn = self._read()
            if torn:
                lines.append(self._set_aside(lines, torn))
            return self._write(lines, kind, fields)

    def lines(self) -> list[Line]:
        """Return all complete lines, after checking the chain.

        Raises:
            LogError: If a line is not the one that was written. The message names the first such line.
        """
        return self._read()[0]

    def verify(self, head: str | None = None) -> str:
        """Check the chain, and that it continues from a head that was noted elsewhere.

        Args:
            head: Hash of a line, as `partita site log` printed it.

        Returns:
            What was found, as a sentence.

        Raises:
            LogError: If the log is damaged, ends in an incomplete line, or does not hold `head`.
        """
        lines, torn = self._read()
        if torn:
            raise LogError(
                f"{self.path}, line {len(lines) + 1} is incomplete ({len(torn)} bytes): a process was killed while it "
                "wrote, or someone cut the file; the next start of 'partita site run' sets it aside and says so"
            )
        found = [number for number, line in enumerate(lines, 1) if line["hash"] == head]
        if head is not None and not found:
            raise LogError(
                f"{self.path} does not hold the head {head[:64]}: lines were cut off, or the log was written again; "
                "compare it with a copy"
            )
        known = f"; the head that you noted is line {found[0]}" if found else ""
        return f"{len(lines)} lines, each follows from the one before{known}"

    def head(self) -> str:
        """Return the hash of the newest line, to be noted elsewhere."""
        lines = self.lines()
        return str(lines[-1]["hash"]) if lines else START

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(self.path.with_suffix(".lock"), poll_interval=0.01, fallback_to_soft=False):
            yield

    def _read(self) -> tuple[list[Line], bytes]:
        """Return the complete lines and the bytes of an incomplete one at the end."""
        lines: list[Line] = []
        if not self.path.exists():
            return lines, b""
        for raw in atomic_files.lines(self.path):
            if not raw.endswith(b"\n"):
                return lines, raw
            lines.append(self._checked(raw, lines))
        return lines, b""

    def _checked(self, raw: bytes, before: list[Line]) -> Line:
        number = len(before) + 1
        body, hash_of_line = raw[: -len(_end(START))], raw[-len(_end(START)) :]
        # The hash is over the bytes as they were written: a change that JSON ignores is a change.
        if hash_of_line != _end(_hash(body)):
            raise LogError(f"{self.path}, line {number} was changed: its hash does not fit; compare it with a copy")
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            line = {}
        if (
            not isinstance(line, dict)
            or line.get("previous") != (before[-1]["hash"] if before else START)
            or line.get("line") != number
        ):
            raise LogError(
                f"{self.path}, line {number} does not follow from the line before it: lines were removed, added or "
                "moved; compare it with a copy"
            )
        return line

    def _write(self, lines: list[Line], kind: str, fields: Mapping[str, Any]) -> Line:
        line = {
            **fields,
            "line": len(lines) + 1,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "kind": kind,
            "previous": lines[-1]["hash"] if lines else START,
        }
        body = json.dumps(line, sort_keys=True, separators=(",", ":")).encode()[:-1]
        atomic_files.append(self.path, body + _end(_hash(body)))
        return {**line, "hash": _hash(body)}

    def _set_aside(self, lines: list[Line], torn: bytes) -> Line:
        """Move the incomplete line to a file of its own, and add a line that says so."""
        copy = self.path.with_name(f"{self.path.name}.torn-{len(lines) + 1}")
        atomic_files.write(copy, torn)
        with open(self.path, "r+b") as file:
            file.truncate(self.path.stat().st_size - len(torn))
            os.fsync(file.fileno())
        digest = hashlib.sha256(torn).hexdigest()
        return self._write(lines, "torn", {"reason": f"{copy.name} holds an incomplete line", "digest": digest})


def _hash(body: bytes) -> str:
    """Return the hash of a line, of all its bytes before the hash."""
    return hashlib.sha256(body).hexdigest()


def _end(hash_of_line: str) -> bytes:
    """Return the end of a line, which holds its hash."""
    return b',"hash":"' + hash_of_line.encode() + b'"}\n'
