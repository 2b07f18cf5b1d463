"""The work that all peers do, in one file, and how a peer tells of it. Needs torch, transformers and safetensors only.

A peer says that it is ready, plays a round at each line it is sent (or at once, when its input is closed), tells the
seconds it took, and leaves its final tensors in a file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

LR, WEIGHT_DECAY = 1e-3, 0.01
MLP_RATIO, HEADS, CLASSES = 2, 4, 10


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    pixels: int
    patch: int


@dataclass(frozen=True)
class Part:
    """One client's."""

    images: Tensor  # (example, channel, row, column)
    labels: Tensor  # (example,)
    batches: Tensor  # (round, step, batch) indices of examples


@dataclass(frozen=True)
class Work:
    shape: Shape
    onednn: bool
    start: dict[str, Tensor]
    parts: tuple[Part, ...]
    test: tuple[Tensor, Tensor]

    @property
    def rounds(self) -> int:
        return len(self.parts[0].batches)

    @property
    def total(self) -> int:
        return sum(len(part.labels) for part in self.parts)


def save(work: Work, path: Path) -> None:
    tensors = {f"start {name}": value for name, value in work.start.items()}
    for number, part in enumerate(work.parts):
        tensors |= {f"{field} {number}": value for field, value in vars(part).items()}
    tensors |= {"images test": work.test[0], "labels test": work.test[1]}
    about = {"shape": json.dumps(asdict(work.shape)), "onednn": json.dumps(work.onednn), "parts": str(len(work.parts))}
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, about)


def load(path: str | Path) -> Work:
    """With torch's kernels switched as the file says: alike for all."""
    with safe_open(path, "pt") as file:
        about = file.metadata()
        names = [name.removeprefix("start ") for name in file.keys() if name.startswith("start ")]  # noqa: SIM118
        start = {name: file.get_tensor(f"start {name}") for name in names}
        parts = tuple(
            Part(*(file.get_tensor(f"{field} {number}") for field in ("images", "labels", "batches")))
            for number in range(int(about["parts"]))
        )
        test = file.get_tensor("images test"), file.get_tensor("labels test")
    onednn = json.loads(about["onednn"])
    torch.backends.mkldnn.enabled = onednn
    return Work(Shape(**json.loads(about["shape"])), onednn, start, parts, test)


def plain_vit(shape: Shape) -> Any:
    """As in benchmarks/run.py."""
    from transformers import ViTConfig, ViTForImageClassification

    config: dict[str, Any] = {
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": HEADS,
        "intermediate_size": MLP_RATIO * shape.width,
        "image_size": shape.pixels,
        "patch_size": shape.patch,
        "num_channels": 3,
        "num_labels": CLASSES,
        "attn_implementation": "sdpa",
    }
    return ViTForImageClassification(ViTConfig(**config))


def started(work: Work) -> Any:
    """The model at the start weights."""
    module = plain_vit(work.shape)
    module.load_state_dict(work.start)
    return module


class Told:
    """What a peer says: one line of JSON each. It goes to the standard output, from which all else is kept away."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what a library prints must not come between
        self.start_time = 0.0

    def ready(self, **about: object) -> None:
        self._send({"ready": {"torch": torch.__version__, "threads": torch.get_num_threads(), **about}})

    def wait(self) -> None:
        """For the word to play a round, whose time begins now."""
        sys.stdin.readline()
        self.start_time = time.perf_counter()

    def round(self) -> None:
        self._send({"seconds": time.perf_counter() - self.start_time})

    def done(self, tensors: dict[str, Tensor], path: str) -> None:
        save_file({name: value.detach().clone() for name, value in tensors.items()}, path)
        self._send({"done": path})
        sys.stdin.readline()  # so that memory can be read while it is still held

    def _send(self, what: dict[str, object]) -> None:
        print(json.dumps(what), file=self.out, flush=True)
