"""Large libraries, imported a little sooner."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """For a process of our own: what is imported meanwhile is set apart from all that may become garbage.

    Of the hundreds of thousands of objects that torch and transformers make, nearly all stay for good. To look through
    them again and again took a fifth of the time from the command to the first round.
    """
    known, collecting = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()
        if collecting:
            gc.enable()
