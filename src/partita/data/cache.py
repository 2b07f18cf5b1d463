"""The cache folder: what was computed from a dataset once, for later runs. It can be deleted at any time.

It is `PARTITA_CACHE` if that is set, else `partita` in the user's cache folder. An entry is a folder of files. It is
written under another name and then renamed, so concurrent runs see a complete entry or none.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex
from typing import Literal

from partita.core import memory
from partita.data.errors import DataError

CONTENTS = "contents.json"  # size and digest of each other file of an entry
HASHED_UP_TO = 2**30  # larger files are checked by size only: reading them would delay every start
ABANDONED_AFTER = 24 * 3600  # seconds after which an unfinished entry belongs to a run that died
BLOCK = 2**20
REMEDY = "set PARTITA_CACHE to a folder with enough space that you can write to"

Kind = Literal["images", "tables", "tokens"]


def cache_folder() -> Path:
    """Return the cache folder. It may not exist yet."""
    if chosen := os.environ.get("PARTITA_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "partita"


def cached(kind: Kind, key: str, build: Callable[[Path], None], size: int = 0) -> Path:
    """Return the folder of a cache entry, which is built if it is missing or damaged.

    Args:
        kind: What the entry holds.
        key: Digest of everything that the entry depends on.
        build: Writes the files of the entry into a folder.
        size: Estimate of the entry's bytes, to find out early that there is no space.

    Raises:
        DataError: If the cache folder cannot be written.
    """
    entry = cache_folder() / kind / key
    if entry.exists():
        if _is_whole(entry):
            return entry
        warnings.warn(f"the cached {kind} in {entry} are damaged, so they are computed again", stacklevel=2)
    unfinished = entry.with_name(f"{key}.{token_hex(4)}.part")
    try:
        # The entries hold what the data holds, so they are for this user only.
        entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_abandoned(entry.parent)
        if size > (free := shutil.disk_usage(entry.parent).free):
            raise DataError(
                f"the cache folder {cache_folder()} has {memory.size(free)} free, but the {kind} need about "
                f"{memory.size(size)}; {REMEDY}"
            )
        unfinished.mkdir(mode=0o700)
        build(unfinished)
        contents = {file.name: _checksum(file) for file in sorted(unfinished.iterdir())}
        (unfinished / CONTENTS).write_text(json.dumps(contents))
        _publish(unfinished, entry)
    except OSError as error:
        raise DataError(f"cannot write to the cache folder {cache_folder()}: {error.strerror}; {REMEDY}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return entry


def _publish(unfinished: Path, entry: Path) -> None:
    """Rename an entry to its final name. If another run was faster, its entry stays."""
    if entry.exists() and not _is_whole(entry):
        damaged = entry.with_name(f"{entry.name}.{token_hex(4)}.part")
        entry.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        unfinished.rename(entry)
    except OSError:
        if not _is_whole(entry):
            raise


def _is_whole(entry: Path) -> bool:
    try:
        contents = json.loads((entry / CONTENTS).read_text())
        return all(_checksum(entry / name) == checksum for name, checksum in contents.items())
    except (OSError, ValueError, AttributeError):
        return False


def _checksum(file: Path) -> list[int | str]:
    size = file.stat().st_size
    return [size, digest_of_file(file) if size <= HASHED_UP_TO else ""]


def digest_of_file(file: Path) -> str:
    """Return a hash of the content of a file."""
    found = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            found.update(block)
    return found.hexdigest()


def identity_of_file(file: Path) -> str:
    """Return a text that changes when a file does: its path, size and time of change."""
    found = file.resolve().stat()
    return f"{file.resolve()}:{found.st_size}:{found.st_mtime_ns}"


def _remove_abandoned(folder: Path) -> None:
    for unfinished in folder.glob("*.part"):
        try:
            if time.time() - unfinished.stat().st_mtime > ABANDONED_AFTER:
                shutil.rmtree(unfinished, ignore_errors=True)
        except FileNotFoundError:  # its run has just finished it
            continue
