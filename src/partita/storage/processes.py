"""Which process writes a folder, whether it is still there, and processes that end with their parent."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1  # of Linux' prctl


def this_process() -> dict[str, Any]:
    """Return what identifies this process to readers of the folder: its number, and a digest of the machine."""
    return {"pid": os.getpid(), "machine": _machine()}


def is_gone(process: Mapping[str, Any]) -> bool:
    """Return whether a process from `this_process` has ended. False if it ran on another machine: nobody knows."""
    pid = process.get("pid")
    if not isinstance(pid, int) or not 0 < pid < 2**31 or process.get("machine") != _machine():
        return False
    try:
        os.kill(pid, 0)  # signal 0 only asks
    except ProcessLookupError:
        return True
    except PermissionError:  # it exists and is another user's
        return False
    return False


def end_with_parent() -> None:
    """Let this process end when the one that started it does, even if that is killed. It has an effect on Linux only.

    It is for `preexec_fn` of a process whose parent must not leave it behind.
    """
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _machine() -> str:
    """Return a digest that differs between machines, starts of a machine, and containers with numbers of their own."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):  # only Linux has these
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
