"""CUDA kernels, compiled from source when they are first used.

The sources are plain C apart from a few CUDA words, so that tests can compile and run them on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from partita.core import torch_private

THREADS = 256  # of a CUDA block
MAX_THREADS = 2**32 - 1  # kernels count threads in 32 bits
# The number of this thread, and a return if there are more threads than work.
THREAD = """
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define THREAD(count) \\
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x; \\
    if (thread >= (u32)(count)) return;
"""


def launch(source: str, name: str, count: int, *args: torch.Tensor | int) -> None:
    """Run a kernel on the current stream.

    Args:
        source: The kernel's source, which starts with `THREAD`.
        name: The name of the kernel. Its last argument is the number of threads.
        count: The number of threads, at most `MAX_THREADS`.
        args: The arguments before it: contiguous tensors on one GPU, and 32-bit numbers.
    """
    assert count <= MAX_THREADS
    device = next(value.device for value in args if isinstance(value, torch.Tensor))
    if not count:
        return
    with torch.cuda.device(device):
        kernel = _compiled(source, name, device)
        kernel(grid=(-(-count // THREADS), 1, 1), block=(THREADS, 1, 1), args=[*args, count])


@cache
def _compiled(source: str, name: str, device: torch.device) -> Callable[..., Any]:
    """A compiled kernel belongs to one device."""
    kernel: Callable[..., Any] = torch_private.compile_kernel(source, name)
    return kernel
