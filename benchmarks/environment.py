"""What a benchmark writes down beside its numbers."""

from __future__ import annotations

import platform

import torch


def environment(device: torch.device, onednn: object, work: str) -> dict[str, object]:
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "onednn": str(onednn),
        "work": work,
    }
