"""A site's log of what left it: one JSON line per event, chained by hashes.

The newest hash, the head, should be noted somewhere else: see `storage.chained_lines`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from partita.storage import atomic_files
from partita.storage.chained_lines import START, ChainedLines, Line

FILE = "log.jsonl"


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
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        chain = self._chain()
        with chain.locked():
            lines, torn = chain.read()
            if torn:
                lines.append(self._set_aside(lines, torn))
            return self._write(lines, kind, fields)

    def lines(self) -> list[Line]:
        """Return all complete lines, after checking the chain.

        Raises:
            LogError: If a line is not the one that was written. The message names the first such line.
        """
        return self._chain().read()[0]

    def verify(self, head: str | None = None) -> str:
        """Check the chain, and that it continues from a head that was noted elsewhere.

        Args:
            head: Hash of a line, as `partita site log` printed it.

        Returns:
            What was found, as a sentence.

        Raises:
            LogError: If the log is damaged, ends in an incomplete line, or does not hold `head`.
        """
        lines, torn = self._chain().read()
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

    def _chain(self) -> ChainedLines:
        return ChainedLines(self.path, LogError)

    def _write(self, lines: list[Line], kind: str, fields: Line) -> Line:
        time = datetime.now(UTC).isoformat(timespec="seconds")
        return self._chain().append(lines[-1] if lines else None, {**fields, "time": time, "kind": kind})[0]

    def _set_aside(self, lines: list[Line], torn: bytes) -> Line:
        """Move the incomplete line to a file of its own, and add a line that says so."""
        copy = self.path.with_name(f"{self.path.name}.torn-{len(lines) + 1}")
        atomic_files.write(copy, torn)
        self._chain().cut(torn)
        digest = hashlib.sha256(torn).hexdigest()
        return self._write(lines, "torn", {"reason": f"{copy.name} holds an incomplete line", "digest": digest})
