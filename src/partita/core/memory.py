"""How much memory is free, checked before something large is allocated."""

from __future__ import annotations

import os
from pathlib import Path

_CONTAINER = Path("/sys/fs/cgroup")


class SizeError(ValueError):
    """Something that does not fit into memory."""


def require(wanted: int, what: str, remedy: str) -> None:
    """Raise SizeError where so many bytes are not free."""
    free = available()
    if wanted > free:
        raise SizeError(f"{what} would take {size(wanted)}, but {size(free)} of memory are free; {remedy}")


def available() -> int:
    """Bytes that this process can allocate without swapping."""
    return min(_of_machine(), _of_container())


def size(count: int) -> str:
    """Bytes in a unit that suits them."""
    for unit, factor in (("EB", 10**18), ("PB", 10**15), ("TB", 10**12), ("GB", 10**9)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count / 10**6:.1f} MB"


def _of_machine() -> int:
    """Where the system does not say what is free, all that the machine has."""
    said = Path("/proc/meminfo")
    if said.exists():
        sizes = dict(line.split(":") for line in said.read_text().splitlines())
        return int(sizes["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_container() -> int:
    """Below the limit of the control group, which /proc/meminfo does not know."""
    try:
        limit, used = ((_CONTAINER / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        return int(limit) - int(used)
    except (OSError, ValueError):  # there is none, or the limit is the word "max"
        return 2**63
