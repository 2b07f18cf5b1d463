"""Files that are either whole or absent: written aside, flushed to disk, then renamed.

A sealed file also carries the digest of its bytes in its name, so that damage is found and never loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path


class DiskError(OSError):
    """Something could not be written; what was saved before is untouched."""


class DamageError(ValueError):
    """A sealed file whose bytes are not as they were written."""


_SEALED = re.compile(r"(\d+)-([0-9a-f]{32})\.safetensors")


def seal(folder: Path, number: int, data: bytes) -> Path:
    """Write the data as number-digest.safetensors, in place of any other file of that number."""
    path = folder / f"{number:06d}-{_digest(data)}.safetensors"
    write(path, data)
    for other in sealed(folder):
        if other != path and number_of(other) == number:
            other.unlink()
    return path


def unseal(path: Path, remedy: str) -> bytes:
    data = path.read_bytes()
    if f"-{_digest(data)}." not in path.name:
        raise DamageError(f"{path} is damaged: its bytes do not match the digest in its name; {remedy}")
    return data


def sealed(folder: Path) -> list[Path]:
    """By number, lowest first."""
    return sorted(path for path in folder.glob("*.safetensors") if _SEALED.fullmatch(path.name))


def number_of(path: Path) -> int:
    return int(path.name.partition("-")[0])


def write(path: Path, data: bytes) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        _sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # where the folder itself is at fault, there is nothing to clean up
            aside.unlink()
        raise DiskError(
            f"cannot write {path} ({error.strerror}; {len(data):,} bytes); what was saved before is whole: "
            "make room or fix the folder, then resume the run"
        ) from error


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _sync(folder: Path) -> None:
    """The rename itself must reach the disk too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
