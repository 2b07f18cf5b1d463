"""The folder in which compiled programs outlive a process.

torch keeps them in a folder of /tmp unless told otherwise. It is lost when the machine restarts, and all users know its
name. Whoever can write to the folder can run code as the user who reads it, because torch loads pickles and shared
libraries from it. So the folder belongs to the user alone.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from partita.core.settings import RunError

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # torch's own; Triton's kernels are in a folder below it


def use_program_cache(cache: Path) -> None:
    """Let torch keep compiled programs in a folder below the cache folder, or in `TORCHINDUCTOR_CACHE_DIR` if set.

    Args:
        cache: The cache folder. It may be shared with other users.

    Raises:
        RunError: If the folder cannot be created, or if other users could write to it.
    """
    given = os.environ.get(VARIABLE)
    folder = Path(given) if given else cache / f"programs-{os.getuid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = folder.resolve()
        _check_private(folder)
    except OSError as error:
        raise RunError(f"cannot keep compiled programs in {folder}: {error.strerror}; {_remedy(given)}") from error
    os.environ[VARIABLE] = str(folder)


def _check_private(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(0, "other users can write to it, so that they could run code as you")
    for parent in folder.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise PermissionError(0, f"all users can replace what is in {parent}, so that they could run code as you")


def _remedy(given: str | None) -> str:
    chosen = VARIABLE if given else "PARTITA_CACHE"
    return f"set {chosen} to a folder that only you can write to, or engine.compile to false"
