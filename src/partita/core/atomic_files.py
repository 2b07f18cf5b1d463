"""Files that are either whole or absent: written aside, flushed to disk, then renamed.

A sealed file also carries the digest of its bytes in its name, so that damage is found and never loaded. Nothing here
follows a symbolic link at the end of a path, and `refuse_links` finds those on the way.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MAX_FILE_BYTES = 2**28  # bytes of a file that holds text
MAX_LINE_BYTES = 2**26  # bytes of one line


class DiskError(OSError):
    """Something could not be written; what was saved before is untouched."""


class DamageError(ValueError):
    """A file whose bytes are not as they were written."""


class LinkError(ValueError):
    """Something in a run folder that is neither a regular file nor a folder."""


_CHECKSUMMED = re.compile(r"(\d+)-([0-9a-f]{32})\.safetensors")


def write_checksummed(folder: Path, number: int, data: bytes) -> Path:
    """Write the data as number-digest.safetensors, in place of any other file of that number."""
    path = folder / checksummed_name(number, digest(data))
    write(path, data)
    for other in list_checksummed(folder):
        if other != path and number_in_name(other) == number:
            other.unlink()
    return path


def read_checksummed(path: Path, remedy: str) -> bytes:
    with open_regular_file(path) as file:
        data = file.read()
    if digest_in_name(path) != digest(data):
        raise DamageError(f"{path} is damaged: its bytes do not match the digest in its name; {remedy}")
    return data


def list_checksummed(folder: Path) -> list[Path]:
    """By number, lowest first."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(names) if _CHECKSUMMED.fullmatch(name)]


def checksummed_name(number: int, digest: str) -> str:
    return f"{number:06d}-{digest}.safetensors"


def number_in_name(path: Path) -> int:
    return int(path.name.partition("-")[0])


def digest_in_name(path: Path) -> str:
    return path.stem.partition("-")[2]


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def write(path: Path, data: bytes) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.unlink(missing_ok=True)  # of a process that died, or a link that somebody laid here
        with open_regular_file(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        _sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # where the folder itself is at fault, there is nothing to clean up
            aside.unlink()
        raise _write_error(path, error, data) from error


def append(path: Path, data: bytes) -> None:
    """On disk before it returns."""
    try:
        with open_regular_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as file:
            begins = not os.fstat(file.fileno()).st_size
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if begins:
            _sync(path.parent)
    except OSError as error:
        raise _write_error(path, error, data) from error


def _write_error(path: Path, error: OSError, data: bytes) -> DiskError:
    return DiskError(
        f"cannot write {path} ({error.strerror}; {len(data):,} bytes); what was saved before is whole: "
        "make room or fix the folder, then resume the run"
    )


def open_regular_file(path: Path, flags: int = os.O_RDONLY) -> BinaryIO:
    """A regular file. A symbolic link is refused, and a pipe does not make us wait."""
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a pipe without a reader
            raise _unexpected_type(path) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _unexpected_type(path)
    return os.fdopen(handle, "rb" if flags == os.O_RDONLY else "wb")


def read(path: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise DamageError(f"{path} holds {size:,} bytes; at most {limit:,} are read, so restore it from a copy")
        return file.read()


def read_json(path: Path) -> Any:
    return parse_json(read(path), str(path))


def parse_json(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{where} is not valid JSON ({error}); restore it as it was written") from error


def lines(path: Path) -> Iterator[bytes]:
    """With their ends; a line that is too long is an error before it fills the memory."""
    with open_regular_file(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise DamageError(
                    f"{path}, line {number} has more than {MAX_LINE_BYTES:,} bytes; restore the file from a copy"
                )
            yield line


def refuse_links(folder: Path) -> None:
    """Everything below the folder must be a regular file or a folder. Where the folder itself lies is the user's."""
    folders = [os.fspath(folder)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    raise _unexpected_type(Path(entry.path))


def _unexpected_type(path: Path) -> LinkError:
    kind = "a symbolic link" if path.is_symlink() else "no regular file"
    return LinkError(f"{path} is {kind}, and partita follows none inside a run folder; put the file itself there")


def _sync(folder: Path) -> None:
    """The rename itself must reach the disk too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
