"""Faster imports of large libraries."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection while importing, and freeze the imported objects afterwards.

    torch and transformers create hundreds of thousands of objects, nearly all of them permanent. Scanning them
    repeatedly took a fifth of the time from the command to the first round. Use this only in partita's own processes:
    it changes the global state of the garbage collector.
    """
    known, collecting = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()
            atexit.register(_unfreeze_triton)
        if collecting:
            gc.enable()


def _unfreeze_triton() -> None:
    """Let triton's objects be collected at the end: it reports frozen ones as leaked, in thirty lines per command.

    Without triton everything stays frozen, because collecting all modules would delay the end of every command.
    """
    if "triton" in sys.modules:
        gc.unfreeze()
