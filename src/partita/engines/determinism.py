"""`engine.deterministic`: kernels on a GPU that give the same bits each time.

`True` lets torch refuse an operation without such a kernel, `False` lets it use any kernel. "auto" is strict in
training steps, where torch's own "warn only" would let fused attention sum in any order, until an operation lacks such
a kernel.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from partita.core.settings import RunError

LACKS_KERNEL = re.compile(r"([^\s:][^:\n]*?) does not have a deterministic implementation")
LETS_ATTENTION_VARY = "defaults to a non-deterministic algorithm"  # torch warns so of fused attention
_without_kernel: list[str] = []  # operations that steps of this process may use nevertheless


class NotDeterministicError(RunError):
    """An operation has no deterministic kernel, and the run asks for one."""


def set_determinism(wanted: bool | Literal["auto"]) -> None:
    """Choose the kernels that this process uses on a GPU."""
    # Otherwise matrix products may sum in different orders.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(bool(wanted), warn_only=wanted == "auto")
    _without_kernel.clear()


def _told(operation: str) -> str:
    """Say of an operation what it means for the run."""
    return f"{operation} has no deterministic kernel on this device, so the last digits may differ between runs"


@contextmanager
def strict_steps() -> Iterator[None]:
    """Let torch refuse operations without a deterministic kernel, if none is known yet."""
    if not torch.is_deterministic_algorithms_warn_only_enabled() or _without_kernel:
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


def go_on_without(error: BaseException) -> str:
    """Let steps use the operation that torch refused from now on.

    Returns:
        What to tell the user; "" if the error has another reason.

    Raises:
        NotDeterministicError: If the run asks for deterministic kernels.
    """
    found = LACKS_KERNEL.search(str(error))
    if not found:
        return ""
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise NotDeterministicError(refusal(error)) from error
    _without_kernel.append(found[1])
    return _told(found[1])


def refusal(error: BaseException) -> str:
    """Return what to tell a user whose run asks for deterministic kernels; "" if the error has another reason."""
    found = LACKS_KERNEL.search(str(error))
    if not found:
        return ""
    return (
        f"engine.deterministic is true, but {found[1]} has no deterministic kernel on this device; set it to 'auto', "
        "but then the last digits may differ between runs"
    )


@contextmanager
def found_operations() -> Iterator[list[str]]:
    """Collect what to tell the user of operations without a deterministic kernel, of which torch warns."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield found
    for each in seen:
        if operation := LACKS_KERNEL.search(str(each.message)):
            if operation[1] not in _without_kernel:
                _without_kernel.append(operation[1])
                found.append(_told(operation[1]))
        elif LETS_ATTENTION_VARY not in str(each.message):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    for message in (*map(re.escape, _without_kernel), f".*{LETS_ATTENTION_VARY}"):
        warnings.filterwarnings("ignore", message)  # torch would say so in each step
