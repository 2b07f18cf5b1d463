"""Runs the source of a CUDA kernel on the CPU, thread by thread, in place of `cuda_kernels.launch`."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
from torch import Tensor

PRELUDE = """
#include <cmath>
using std::nan;
#define __global__
#define __device__ static
#define __align__(bytes) alignas(bytes)
struct Index { unsigned x; };
extern "C" { Index blockIdx, threadIdx, blockDim = {1}; }
"""


class CpuKernels:
    """Compiles kernels with the C++ compiler of this machine.

    Args:
        folder: For the programs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launches: list[tuple[str, int]] = []  # (name, threads)
        self.compiler = shutil.which("c++") or ""
        if not self.compiler:
            pytest.skip("there is no C++ compiler here")

    def launch(self, source: str, name: str, count: int, *args: Tensor | int) -> None:
        """Take the arguments of `cuda_kernels.launch`. A few threads more than asked for must change nothing."""
        self.launches.append((name, count))
        program = ctypes.CDLL(str(self._compiled(source)))
        index = ctypes.c_uint.in_dll(program, "blockIdx")
        values = [*args, count]
        assert all(value.is_contiguous() for value in values if isinstance(value, Tensor))
        given = [ctypes.c_void_p(v.data_ptr()) if isinstance(v, Tensor) else ctypes.c_int(v) for v in values]
        for thread in range(count + 3):
            index.value = thread
            getattr(program, name)(*given)

    def _compiled(self, source: str) -> Path:
        path = self.folder / f"{hashlib.sha256(source.encode()).hexdigest()}.so"
        if not path.exists():
            path.with_suffix(".cpp").write_text(PRELUDE + source)
            command = [self.compiler, "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-w", "-o", path]
            subprocess.run([*command, path.with_suffix(".cpp")], check=True)
        return path
