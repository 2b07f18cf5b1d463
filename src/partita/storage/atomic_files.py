"""Atomic file writes: a file is either complete or absent. Data goes to a temporary file, is synced, then renamed.

A checksummed file also has the digest of its bytes in its name, so damage is detected on reading. No function follows a
symbolic link in the last component of a path; `refuse_links` finds links in the folders below a run folder.
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

MAX_FILE_BYTES = 2**28  # maximum size of a text file
MAX_LINE_BYTES = 2**26  # maximum length of a line


class DiskError(OSError):
    """A file could not be written; all earlier files are intact."""


class DamageError(ValueError):
    """A file does not have the content that was written."""


class LinkError(ValueError):
    """A run folder contains something that is neither a regular file nor a folder."""


_CHECKSUMMED = re.compile(r"(\d+)-([0-9a-f]{32})\.safetensors")


def write_checksummed(folder: Path, number: int, data: bytes) -> Path:
    """Write data as `{number}-{digest}.safetensors` and delete any other file with that number.

    Returns:
        The path of the file.

    Raises:
        DiskError: If the file cannot be written.
    """
    path = folder / checksummed_name(number, digest(data))
    write(path, data)
    for other in list_checksummed(folder):
        if other != path and number_in_name(other) == number:
            other.unlink()
    return path


def link_checksummed(path: Path, folder: Path) -> None:
    """Give a checksummed file a second name in another folder, which stays if the first is deleted.

    Raises:
        DiskError: If the second name cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, folder / path.name, follow_symlinks=False)
        _sync(folder)
    except FileExistsError:
        return
    except OSError:  # the file system has no hard links
        with open_regular_file(path) as file:
            write(folder / path.name, file.read())


def read_checksummed(path: Path, remedy: str) -> bytes:
    """Read a checksummed file.

    Raises:
        DamageError: If the bytes do not match the digest in the name. The message ends with `remedy`.
    """
    with open_regular_file(path) as file:
        data = file.read()
    if digest_in_name(path) != digest(data):
        raise DamageError(f"{path} is damaged: its bytes do not match the digest in its name; {remedy}")
    return data


def list_checksummed(folder: Path) -> list[Path]:
    """Return the checksummed files in a folder, by number, lowest first; none if there is no such folder."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(names) if _CHECKSUMMED.fullmatch(name)]


def checksummed_name(number: int, digest: str) -> str:
    """Return the name of the checksummed file with this number and digest."""
    return f"{number:06d}-{digest}.safetensors"


def number_in_name(path: Path) -> int:
    """Return the number in the name of a checksummed file."""
    return int(path.name.partition("-")[0])


def digest_in_name(path: Path) -> str:
    """Return the digest in the name of a checksummed file."""
    return path.stem.partition("-")[2]


def digest(data: bytes) -> str:
    """Return a hash of the bytes as 32 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def write(path: Path, data: bytes, sync: bool = True, mode: int = 0o666) -> None:
    """Write a file atomically. The data is on disk when the function returns.

    Args:
        path: The file.
        data: Its new content.
        sync: Wait for the disk. A file that does not matter after a power cut can do without.
        mode: The file's permissions, less the umask; 0o600 for a file that only its owner can read.

    Raises:
        DiskError: If the file cannot be written. An existing file is intact.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # left by a process that died, or a planted link
        with open_regular_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if sync:
            _sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # if the folder itself is the problem, there is nothing to clean up
            temporary.unlink()
        raise _write_error(path, error, data) from error


def append(path: Path, data: bytes) -> None:
    """Append to a file. The data is on disk when the function returns.

    Raises:
        DiskError: If the file cannot be written.
    """
    try:
        with open_regular_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as file:
            was_empty = not os.fstat(file.fileno()).st_size
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if was_empty:
            _sync(path.parent)
    except OSError as error:
        raise _write_error(path, error, data) from error


def _write_error(path: Path, error: OSError, data: bytes) -> DiskError:
    return DiskError(
        f"cannot write {path} ({error.strerror}; {len(data):,} bytes); what was saved before is intact: "
        "free some space or fix the folder, then resume the run"
    )


def open_regular_file(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> BinaryIO:
    """Open a regular file. Does not follow a symbolic link and does not block on a pipe.

    Raises:
        LinkError: If the path is not a regular file.
    """
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link; a pipe without a reader
            raise _unexpected_type(path) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _unexpected_type(path)
    return os.fdopen(handle, "rb" if flags == os.O_RDONLY else "wb")


def read(path: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """Read a file of at most `limit` bytes; a larger one raises DamageError."""
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise DamageError(f"{path} has {size:,} bytes; the limit is {limit:,}, so restore it from a copy")
        return file.read()


def read_json(path: Path) -> Any:
    """Read and parse a JSON file."""
    return parse_json(read(path), str(path))


def parse_json(data: bytes, where: str) -> Any:
    """Parse JSON from `data`.

    Raises:
        DamageError: If it is not valid. The message names `where`.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{where} is not valid JSON ({error}); restore it as it was written") from error


def lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their line ends.

    Raises:
        DamageError: If a line is longer than `MAX_LINE_BYTES`, before it fills the memory.
    """
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
    """Raise LinkError if anything below the folder is neither a regular file nor a folder.

    The path of the folder itself may contain links: that is the user's choice.
    """
    folders = [os.fspath(folder)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    raise _unexpected_type(Path(entry.path))


def _unexpected_type(path: Path) -> LinkError:
    kind = "a symbolic link" if path.is_symlink() else "not a regular file"
    return LinkError(f"{path} is {kind}; a run folder may contain only regular files, so put the file itself there")


def _sync(folder: Path) -> None:
    """Sync the folder, so that a rename reaches the disk too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
