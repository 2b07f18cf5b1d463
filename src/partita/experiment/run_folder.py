"""The run folder: resolved config, environment, plan, one row per round, and the final result."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from partita.core import own_code
from partita.privacy import secret
from partita.record.file_names import (
    AUDIT,
    CHECKPOINTS,
    CHECKSUMS,
    CLIENTS,
    CONFIG,
    ENVIRONMENT,
    EXPORTED,
    EXTENSION,
    LOCK,
    PLAN,
    PRIVACY,
    PROGRESS,
    REPORT,
    RESULT,
    ROWS,
    SAMPLES,
    SPLIT,
    TRACK,
)
from partita.record.row import Row
from partita.storage import atomic_files
from partita.storage.atomic_files import (
    DamageError,
    DiskError,
    list_checksummed,
    number_in_name,
    read_json,
    refuse_links,
    write,
)
from partita.storage.checkpoint import BEST
from partita.track import TRACKERS

IDENTITY = "run"  # entry in the checksums of an extended run: its identity, which is that of the shorter run
OUTDATED = (RESULT, AUDIT, SAMPLES)  # files about the run as it was before an extension
REMEDY = "restore it from a copy, or start a new run in another folder"


class RunFolderError(ValueError):
    """The run folder does not exist, holds another run, or is in use."""


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write(path, to_json(value))


def to_json(value: Any) -> bytes:
    """Return the content of a JSON file."""
    return (json.dumps(value, indent=1) + "\n").encode()


def write_checksums(folder: Path, names: Iterable[str]) -> None:
    """Write the digests of these files. They are written after the files, and identify the run."""
    write_json(folder / CHECKSUMS, {name: atomic_files.digest(atomic_files.read(folder / name)) for name in names})


def require_run(folder: Path) -> None:
    """Raise a RunFolderError if a folder holds no run."""
    if not (folder / CONFIG).is_file():
        raise RunFolderError(f"{folder} holds no run (it has no {CONFIG}); 'partita ls' lists the existing runs")


def require_model(folder: Path) -> None:
    """Raise a RunFolderError if a folder holds neither a run nor an exported model."""
    if not (folder / CONFIG).is_file() and not (folder / EXPORTED).is_file():
        raise RunFolderError(
            f"{folder} holds neither a run ({CONFIG}) nor an exported model ({EXPORTED}); 'partita ls' lists the runs"
        )


def verify(folder: Path) -> str | None:
    """Check the files that were written before the first round.

    Returns:
        The run's identity, or None if the run was stopped before all these files were written. Nothing depends on
        them then.

    Raises:
        DamageError: If a file is missing or was changed.
        RunFolderError: If an extension of the run was interrupted.
    """
    refuse_links(folder)
    if (folder / EXTENSION).exists():
        raise RunFolderError(
            f"the extension of {folder} to more rounds was interrupted; complete it with 'partita resume {folder}'"
        )
    path = folder / CHECKSUMS
    if not path.exists():
        if list_checksummed(folder / CHECKPOINTS):
            raise DamageError(f"{path} is missing; {REMEDY}")
        return None
    listed = read_json(path)
    if not isinstance(listed, dict) or CONFIG not in listed:
        raise DamageError(f"{path} does not hold the checksums of a run; {REMEDY}")
    identity = listed.pop(IDENTITY, None)
    for name, digest in listed.items():
        file = folder / name
        if ".." in file.parts or file.is_absolute() != folder.is_absolute() or folder not in file.parents:
            raise DamageError(f"{path} names '{name}', which is outside the run folder; {REMEDY}")
        if name == str(secret.FILE) and not os.path.lexists(file) and finished(folder) is not None:
            continue  # its owner deleted it, so that nobody can recompute the noise of the finished run
        if not file.is_file():
            raise DamageError(f"{file} is missing, but {CHECKSUMS} names it; {REMEDY}")
        if atomic_files.digest(atomic_files.read(file)) != digest:
            raise DamageError(
                f"{file} does not match its digest in {CHECKSUMS}, so one of the two was changed; {REMEDY}"
            )
    return str(identity or atomic_files.digest(json.dumps(listed, sort_keys=True).encode()))


def replace_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replace files that were written before the first round, to extend the run.

    If this is interrupted, `complete_extension` completes it.

    Args:
        folder: The run folder, locked.
        files: The new contents, by name.
    """
    listed = read_json(folder / CHECKSUMS)
    listed |= {name: atomic_files.digest(data) for name, data in files.items()}
    # The checkpoints of the shorter run stay valid, so the run keeps its identity.
    listed[IDENTITY] = verify(folder)
    texts = {name: data.decode() for name, data in {**files, CHECKSUMS: to_json(listed)}.items()}
    write_json(folder / EXTENSION, {"files": texts, "digest": atomic_files.digest(to_json(texts))})
    _apply(folder)


def complete_extension(folder: Path) -> None:
    """Complete an extension that was interrupted, if there is one.

    Raises:
        DamageError: If the file that describes it is damaged.
    """
    if (folder / EXTENSION).exists():
        with lock(folder):
            _apply(folder)


def _apply(folder: Path) -> None:
    """Replace the files as described in the folder's extension file, and delete that file last."""
    path = folder / EXTENSION
    with expect_format(path):
        described = read_json(path)
        texts = dict(described["files"])
        whole = described["digest"] == atomic_files.digest(to_json(texts))
    if not whole or not texts.keys() <= {CONFIG, PLAN, PRIVACY, CHECKSUMS}:
        raise DamageError(f"{path} is damaged; {REMEDY}")
    for name in OUTDATED:
        (folder / name).unlink(missing_ok=True)
    for name, text in texts.items():
        write(folder / name, text.encode())
    path.unlink()


class RowLog:
    """Appends rows to the run's row file and keeps their digest."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ROWS
        self._state = hashlib.blake2b(digest_size=16)
        for line in _lines(folder):
            self._state.update(line)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row and sync it to disk, so that no checkpoint covers a round without a row."""
        line = (json.dumps(row) + "\n").encode()
        atomic_files.append(self.path, line)
        self._state.update(line)

    def digest(self) -> str:
        """Return the digest of all rows so far."""
        return self._state.hexdigest()


def keep_rows(folder: Path, done: int, digest: str | None = None) -> None:
    """Keep the rows of the first `done` rounds and drop the others, which will be run again.

    Raises:
        DamageError: If the kept rows do not have this digest.
    """
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
    """Read the lines of the row file. There are none if it does not exist yet."""
    return atomic_files.lines(folder / ROWS) if os.path.lexists(folder / ROWS) else iter(())


def read_rows(folder: Path) -> Iterator[Row]:
    """Yield the rows recorded so far. There are none if the file does not exist yet."""
    for number, line in enumerate(_lines(folder), 1):
        yield atomic_files.parse_json(line, f"{folder / ROWS}, line {number}")


@contextmanager
def expect_format(path: Path) -> Iterator[None]:
    """Turn errors from missing keys or wrong types into a DamageError: partita did not write the file like this."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise DamageError(f"{path} is not in the format that partita writes ({error!r}); {REMEDY}") from error


def count_rows(folder: Path) -> int:
    """Count the complete rows."""
    return sum(line.endswith(b"\n") for line in _lines(folder))


def saved_rounds(folder: Path) -> int:
    """Return the number of rounds covered by the newest checkpoint."""
    saved = list_checksummed(folder / CHECKPOINTS)
    return number_in_name(saved[-1]) if saved else 0


def finished(folder: Path) -> dict[str, Any] | None:
    """Return the run's result, or None if the run has not finished."""
    path = folder / RESULT
    return read_json(path) if os.path.lexists(path) else None


def stopped(folder: Path) -> str | None:
    """Say why and when a finished run stopped before its last round; None if it did not."""
    with expect_format(folder / RESULT):
        early = (finished(folder) or {}).get("stopped")
        return f"stopped after round {early['after']}: {early['reason']}" if early else None


def holds_run(folder: Path) -> bool:
    """Whether a folder holds a run or a part of one."""
    states = (folder / CHECKPOINTS, *(folder / CLIENTS).glob("*"))
    return any(os.path.lexists(folder / name) for name in (CONFIG, ROWS)) or any(map(list_checksummed, states))


def changed_at(folder: Path) -> int | None:
    """Return when a run's config was written, in nanoseconds; None if there is none. It differs for another run."""
    try:
        return (folder / CONFIG).stat().st_mtime_ns
    except FileNotFoundError:
        return None


def describe(folder: Path) -> str:
    """Say how far the run in a folder has come, such as "an unfinished run with 3 of 20 rounds saved"."""
    if os.path.lexists(folder / RESULT):
        return "a finished run"
    if (planned := _config(folder).get("rounds")) is None:
        return "a part of a run"
    return f"an unfinished run with {saved_rounds(folder)} of {planned} rounds saved"


def _config(folder: Path) -> dict[str, Any]:
    """Return the recorded config as it is. It is empty if there is none or it is damaged."""
    try:
        return tomllib.loads(atomic_files.read(folder / CONFIG).decode())
    except (OSError, ValueError, RecursionError):
        return {}


def refuse_run(folder: Path) -> None:
    """Raise RunFolderError if a folder already holds a run."""
    if not holds_run(folder):
        return
    ways = ["choose another folder with --out"]
    if _config(folder):
        ways.insert(0, "replace it with --overwrite")
        if not os.path.lexists(folder / RESULT):
            ways.insert(0, "continue it with --resume")
    raise RunFolderError(f"{folder} already holds {describe(folder)}; {', or '.join(ways)}")


def refuse_others(folder: Path) -> None:
    """Raise RunFolderError if a folder has content that is not a run's, so that nothing of it may be overwritten.

    A run leaves a lock. Its config has all keys, and `remove_run` deletes it last.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    complete = {"label", "seed", "rounds", "method", "engine"} <= _config(folder).keys()
    if not os.path.lexists(folder / LOCK) or (holds_run(folder) and not complete):
        raise RunFolderError(
            f"{folder} is not a run folder; --overwrite replaces only runs, so choose another folder with --out"
        )


def remove_run(folder: Path) -> None:
    """Delete the files of a run, and nothing else. The folder must be locked.

    A crash leaves a folder that can be resumed or overwritten: the result goes first and the config last.
    """
    refuse_others(folder)
    if not holds_run(folder):
        return
    (folder / RESULT).unlink(missing_ok=True)
    for states in (folder / CHECKPOINTS / BEST, folder / CHECKPOINTS, *(folder / CLIENTS).glob("*"), folder / CLIENTS):
        for path in list_checksummed(states):
            path.unlink()
        _remove_if_empty(states)
    for name in TRACKERS:
        if (folder / TRACK / name).is_dir():
            shutil.rmtree(folder / TRACK / name)
    _remove_if_empty(folder / TRACK)
    for name in _code_files(folder):
        (folder / name).unlink(missing_ok=True)
    _remove_if_empty(folder / own_code.FOLDER)
    for name in (
        EXTENSION,
        ROWS,
        AUDIT,
        REPORT,
        SAMPLES,
        PROGRESS,
        PRIVACY,
        str(secret.FILE),
        SPLIT,
        PLAN,
        ENVIRONMENT,
        CHECKSUMS,
        CONFIG,
    ):
        (folder / name).unlink(missing_ok=True)
    _remove_if_empty(folder / secret.FILE.parent)


def _code_files(folder: Path) -> list[str]:
    """Return the copies of the user's own files that the recorded config names."""
    recorded = _config(folder).get("code", {})
    names = recorded if isinstance(recorded, dict) else {}
    return [f"{own_code.FOLDER}/{name}" for name in names if "/" not in name and name.endswith(own_code.SUFFIX)]


def _remove_if_empty(folder: Path) -> None:
    with suppress(FileNotFoundError, NotADirectoryError):
        if all(re.fullmatch(r"\..+\.\d+\.part", name) for name in os.listdir(folder)):  # of writers that were killed
            shutil.rmtree(folder)


def environment(device: torch.device, **chosen: object) -> dict[str, str]:
    """Return what the results may depend on besides the config.

    Args:
        device: The device of the run.
        **chosen: Settings that the config left to "auto", as resolved.
    """
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
        **{package: _version(package) for package in packages},
    }


def _version(package: str) -> str:
    """Return the version of a package. Its source may be on the path without being installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Lock a run folder for this process.

    The lock is released when the process ends, even if it is killed. Its forks do not hold it. The file `.lock` stays.

    Raises:
        RunFolderError: If another process holds the lock.
        DiskError: If the folder cannot be written.
    """
    # On a file system without flock, the fallback would be a lock file that a killed process leaves behind.
    file_lock = FileLock(folder / LOCK, blocking=False, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_links(folder)
        file_lock.acquire()
    except Timeout:
        raise RunFolderError(f"{folder} is in use by another process; wait for it or choose another folder") from None
    except OSError as error:
        raise DiskError(f"cannot write to {folder} ({error.strerror}); choose another folder") from error
    try:
        yield
    finally:
        file_lock.release()
