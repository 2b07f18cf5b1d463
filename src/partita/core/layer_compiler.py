"""The compiler for the layers of a model. Training sets it, and models call it for each of their layers.

One program serves all layers that are alike, so that the time to compile does not grow with the depth of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]  # function -> compiled function
_current: ContextVar[Compiler | None] = ContextVar("layer_compiler", default=None)


@contextmanager
def compiled_layers(compiler: Compiler) -> Iterator[None]:
    """Let models compile their layers with `compiler` inside the block."""
    before = _current.set(compiler)
    try:
        yield
    finally:
        _current.reset(before)


def layer_compiler() -> Compiler | None:
    """Return the compiler for layers; None if they run as they are."""
    return _current.get()
