"""A run's folder: the resolved config, the environment, one row a round, the plan, and at the end the result."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import torch

from partita.core import atomic_files
from partita.core.atomic_files import (
    DamageError,
    DiskError,
    list_checksummed,
    number_in_name,
    open_regular_file,
    read_json,
    refuse_links,
    write,
)

CONFIG, ROWS, PLAN, ENVIRONMENT, RESULT = "config.toml", "rows.jsonl", "plan.json", "environment.json", "result.json"
CHECKSUMS, CHECKPOINTS, CLIENTS = "checksums.json", "checkpoints", "clients"
REMEDY = "restore it from a copy, or start the run anew in another folder"


class RunFolderError(ValueError):
    """A run folder that is missing, taken, or in use."""


def write_json(path: Path, value: Any) -> None:
    write(path, (json.dumps(value, indent=1) + "\n").encode())


def write_checksums(folder: Path, names: Iterable[str]) -> None:
    """Written once, after these files: their digests tell a run from every other one."""
    write_json(folder / CHECKSUMS, {name: atomic_files.digest(atomic_files.read(folder / name)) for name in names})


def verify(folder: Path) -> str | None:
    """The run's identity, if its files are as they were written before the first round.

    Returns:
        None where the run was stopped before they were all written, so that nothing depends on them yet.

    Raises:
        DamageError: names the file that is missing or not as it was.
    """
    refuse_links(folder)
    path = folder / CHECKSUMS
    if not path.exists():
        if list_checksummed(folder / CHECKPOINTS):
            raise DamageError(f"{path} is missing; {REMEDY}")
        return None
    listed = read_json(path)
    if not isinstance(listed, dict) or CONFIG not in listed:
        raise DamageError(f"{path} holds no checksums of a run; {REMEDY}")
    for name, digest in listed.items():
        file = folder / name
        if ".." in file.parts or file.is_absolute() != folder.is_absolute() or folder not in file.parents:
            raise DamageError(f"{path} names '{name}', which is outside the run folder; {REMEDY}")
        if not file.is_file():
            raise DamageError(f"{file} is missing, but {CHECKSUMS} names it; {REMEDY}")
        if atomic_files.digest(atomic_files.read(file)) != digest:
            raise DamageError(
                f"{file} does not match its digest in {CHECKSUMS}, so one of the two was changed; {REMEDY}"
            )
    return atomic_files.digest(json.dumps(listed, sort_keys=True).encode())


class RowLog:
    """The rows of a run as they are recorded, and their digest."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ROWS
        self._state = hashlib.blake2b(digest_size=16)
        for line in _lines(folder):
            self._state.update(line)

    def append(self, row: Mapping[str, Any]) -> None:
        """On disk before it returns, so that a checkpoint never knows of a round that has no row."""
        line = (json.dumps(row) + "\n").encode()
        atomic_files.append(self.path, line)
        self._state.update(line)

    def digest(self) -> str:
        return self._state.hexdigest()


def keep_rows(folder: Path, done: int, digest: str | None = None) -> None:
    """Keep the rows of the first `done` rounds, which must have this digest; the others will be run again."""
    path = folder / ROWS
    kept = b"".join(islice(_lines(folder), done))
    if digest is not None and atomic_files.digest(kept) != digest:
        raise DamageError(
            f"{path} does not hold the rows of the first {done} rounds as they were written; restore it from a copy, "
            f"or delete {folder / CHECKPOINTS} to run all rounds again"
        )
    if path.exists() and path.stat().st_size != len(kept):
        write(path, kept)


def _lines(folder: Path) -> Iterator[bytes]:
    """None where there is no file yet."""
    return atomic_files.lines(folder / ROWS) if os.path.lexists(folder / ROWS) else iter(())


def read_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows recorded so far; none where there is no file yet."""
    for number, line in enumerate(_lines(folder), 1):
        yield atomic_files.parse_json(line, f"{folder / ROWS}, line {number}")


@contextmanager
def understanding(path: Path) -> Iterator[None]:
    """A file that is whole, but that partita did not write, lacks keys or has values of another type."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise DamageError(f"{path} is not as partita writes it ({error!r}); {REMEDY}") from error


def count_rows(folder: Path) -> int:
    return sum(line.endswith(b"\n") for line in _lines(folder))


def saved_rounds(folder: Path) -> int:
    """The rounds behind the newest checkpoint."""
    saved = list_checksummed(folder / CHECKPOINTS)
    return number_in_name(saved[-1]) if saved else 0


def finished(folder: Path) -> dict[str, Any] | None:
    path = folder / RESULT
    return read_json(path) if os.path.lexists(path) else None


def environment(device: torch.device, **chosen: object) -> dict[str, str]:
    """What the numbers may depend on besides the config, with what was chosen where that left it open."""
    packages = ("partita", "torch", "transformers", "numpy", "safetensors")
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "device": str(device),
        "threads": str(torch.get_num_threads()),
        "onednn": str(torch.backends.mkldnn.enabled),
        **{name: str(value) for name, value in chosen.items()},
        **{package: version(package) for package in packages},
    }


_held: set[BinaryIO] = set()  # the locks of this process


def _let_go() -> None:
    """A fork shares the locks of its parent, and would hold them after the parent was killed."""
    for handle in _held:
        handle.close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """One process a run folder; the lock goes with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_links(folder)
        handle = open_regular_file(folder / ".lock", os.O_WRONLY | os.O_CREAT)
    except OSError as error:
        raise DiskError(f"cannot write to {folder} ({error.strerror}); choose another folder") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(
                f"{folder} is in use by another process; wait for it or choose another folder"
            ) from None
        _held.add(handle)
        try:
            yield
        finally:
            _held.discard(handle)
