"""Random texts and images, as tasks of custom code for the runs of scripts/test_gpu.py."""

from __future__ import annotations

import torch

from partita.data.ragged import ragged
from partita.data.task import Table, Task, text_task
from partita.tasks import KINDS

PARTS = {0: 48, 1: 12}  # by seed: examples to train and to test on


def texts(kind: str = "text", tokens: int = 8, vocabulary: int = 32) -> Task:
    """Texts of random tokens, whose last one is the end token of the tiny models."""
    parts = []
    for seed, count in PARTS.items():
        draw = torch.Generator().manual_seed(seed)
        rows = [
            [*row, vocabulary - 1]
            for row in torch.randint(4, vocabulary - 1, (count, tokens - 1), generator=draw).tolist()
        ]
        if kind == "lm":
            parts.append(ragged(rows, 2 * tokens, tags=[[*row[1:], -100] for row in rows]))
        else:
            parts.append(ragged(rows, 2 * tokens, torch.randint(0, 3, (count,), generator=draw)))
    return text_task("random", *parts, () if kind == "lm" else ("a", "b", "c"), {}, KINDS[kind], None)


def images(size: int = 16, count: int = 48) -> Task:
    """Images of noise, whose brightness shows their class a little."""
    parts = []
    for seed, examples in {**PARTS, 0: count}.items():
        draw = torch.Generator().manual_seed(seed)
        classes = torch.randint(0, 3, (examples,), generator=draw)
        pixels = torch.randn(examples, 3, size, size, generator=draw) + 0.1 * classes.view(-1, 1, 1, 1)
        parts.append(Table({"pixel_values": pixels}, classes))
    return Task("random", *parts, ("a", "b", "c"), {}, channels=3, size=size)
