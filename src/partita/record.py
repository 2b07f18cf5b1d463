"""A run's folder: the resolved config, the environment, one row a round, the plan, and at the end the result."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from partita.core.files import DiskError, number_of, sealed, write

CONFIG, ROWS, PLAN, ENVIRONMENT, RESULT = "config.toml", "rows.jsonl", "plan.json", "environment.json", "result.json"


class RecordError(ValueError):
    """A run folder that is missing, taken, or in use."""


def write_json(path: Path, value: Any) -> None:
    write(path, (json.dumps(value, indent=1) + "\n").encode())


def append_row(folder: Path, row: Mapping[str, Any]) -> None:
    """On disk before it returns, so that a checkpoint never knows of a round that has no row."""
    path = folder / ROWS
    try:
        with path.open("ab") as file:
            file.write((json.dumps(row) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DiskError(
            f"cannot write {path} ({error.strerror}); what was saved before is whole: make room, then resume the run"
        ) from error


def keep_rows(folder: Path, done: int) -> None:
    """Drop the rows of rounds from `done` on, which will be run again, and a line that was cut short."""
    path = folder / ROWS
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if line.endswith(b"\n") and row["round"] < done:
            kept.append(line)
    write(path, b"".join(kept))


def read_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows recorded so far; none where there is no file yet."""
    if (folder / ROWS).exists():
        for line in (folder / ROWS).read_text().splitlines():
            yield json.loads(line)


def count_rows(folder: Path) -> int:
    path = folder / ROWS
    return path.read_bytes().count(b"\n") if path.exists() else 0


def saved_rounds(folder: Path) -> int:
    """The rounds behind the newest checkpoint."""
    saved = sealed(folder / "checkpoints")
    return number_of(saved[-1]) if saved else 0


def finished(folder: Path) -> dict[str, Any] | None:
    path = folder / RESULT
    return json.loads(path.read_text()) if path.exists() else None


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


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """One process a run folder; the lock goes with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / ".lock").open("w")
    except OSError as error:
        raise DiskError(f"cannot write to {folder} ({error.strerror}); choose another folder") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordError(f"{folder} is in use by another process; wait for it or choose another folder") from None
        yield
