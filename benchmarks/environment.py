"""What a benchmark writes down beside its numbers, and the clock it reads."""

from __future__ import annotations

import platform
import time

import torch


def environment(device: torch.device, onednn: object, work: str) -> dict[str, object]:
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "onednn": str(onednn),
        "work": work,
    }


def now(device: torch.device) -> float:
    """Seconds of this process on a CPU, and of the clock, with all work done, on a GPU."""
    return time.process_time() if device.type == "cpu" else clock(device)


def clock(device: torch.device) -> float:
    """Seconds of the clock, with all work done. They include what other processes do, such as a compiler's."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
