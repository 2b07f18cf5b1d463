"""Results that are the same in many runs, and that the runs of one process share if the process asks for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_limit = 0
_kept: OrderedDict[str, tuple[Any, int]] = OrderedDict()  # results and their bytes, least recently used first


def share_between_runs(limit: int) -> None:
    """Keep results for later runs of this process.

    Args:
        limit: The bytes that they may take together; 0 keeps nothing, which is the default.
    """
    global _limit
    _limit = limit
    _drop()


def shared(key: Callable[[], str], build: Callable[[], T], size: Callable[[T], int]) -> T:
    """Return a result that an earlier run of this process has built, else build it.

    Args:
        key: Computes a text that determines the result. It is called only if results are kept.
        build: Builds the result.
        size: Computes its bytes.
    """
    if not _limit:
        return build()
    name = key()
    if name not in _kept:
        result = build()
        _kept[name] = result, size(result)
        _drop()
        return result
    _kept.move_to_end(name)
    found: T = _kept[name][0]
    return found


def _drop() -> None:
    while _kept and sum(size for _, size in _kept.values()) > _limit:
        _kept.popitem(last=False)
