"""Checks of free memory before large allocations."""

from __future__ import annotations

import os
from pathlib import Path

_CONTAINER = Path("/sys/fs/cgroup")


class SizeError(ValueError):
    """Something does not fit into memory."""


def require(wanted: int, what: str, remedy: str) -> None:
    """Raise SizeError if fewer than `wanted` bytes are free.

    Args:
        wanted: The number of bytes.
        what: What needs them, for the error message.
        remedy: What the user can do.
    """
    free = available()
    if wanted > free:
        raise SizeError(f"{what} would take {size(wanted)}, but only {size(free)} of memory are free; {remedy}")


def available() -> int:
    """Return the number of bytes that this process can allocate without swapping."""
    return min(_of_machine(), _of_container())


def size(count: int) -> str:
    """Format a number of bytes with a suitable unit."""
    for unit, factor in (("EB", 10**18), ("PB", 10**15), ("TB", 10**12), ("GB", 10**9)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count / 10**6:.1f} MB"


def _of_machine() -> int:
    """Free memory of the machine, or its total memory if the system does not report what is free."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        sizes = dict(line.split(":") for line in meminfo.read_text().splitlines())
        return int(sizes["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_container() -> int:
    """Free memory below the limit of the control group, which /proc/meminfo does not include."""
    try:
        limit, used = ((_CONTAINER / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        return int(limit) - int(used)
    except (OSError, ValueError):  # there is no limit, or it is the word "max"
        return 2**63
