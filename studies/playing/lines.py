"""Files of lines: one JSON object per run, appended when the run has ended."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class LinesError(ValueError):
    """A file of lines cannot be read or is in use."""


def read_lines(file: Path) -> list[Line]:
    """Return the lines of a file; none if there is no file. A last line without its end was cut off and is left out.

    Raises:
        LinesError: If another line is not JSON.
    """
    if not file.exists():
        return []
    *whole, _ = file.read_bytes().split(b"\n")
    found = []
    for number, text in enumerate(whole, 1):
        try:
            found.append(json.loads(text))
        except ValueError as error:
            raise LinesError(f"{file}, line {number}, is not JSON: {error}; restore the file from a copy") from error
    return found


def append_line(file: Path, line: Mapping[str, Any]) -> None:
    """Append a line and sync it to disk. What a writer that was killed left of its last line is removed first."""
    with file.open("ab+") as stream:
        end = stream.seek(0, os.SEEK_END)
        kept = 0
        if end:
            stream.seek(0)
            kept = stream.read().rfind(b"\n") + 1
        if kept < end:
            stream.truncate(kept)
        stream.write((json.dumps(line) + "\n").encode())
        stream.flush()
        os.fsync(stream.fileno())


@contextmanager
def only_writer(study: Path) -> Iterator[None]:
    """Keep other processes from playing the same study. The lock ends with this process, even if it is killed.

    Args:
        study: The study's own file, which is locked and not changed.

    Raises:
        LinesError: If another process plays it.
    """
    with study.open() as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LinesError(f"{study} is being played by another process; wait for it") from error
        yield
