"""The federation that all sides train on, and its batches, as partita deals them by its keys."""

from __future__ import annotations

from typing import Any

import torch
from work import HEADS, LR, WEIGHT_DECAY, Part, Shape, Work

from partita import Key, Model, Run, Training, data, methods, models
from partita.core.batch_schedule import shuffled_batches
from partita.core.data import Examples
from partita.core.optim import AdamW
from partita.data import Federation
from partita.engines.autotune import configure_backends

STEPS, BATCH, EXAMPLES = 5, 32, 250  # the last for each client
FIXED: dict[str, Any] = {"steps": STEPS, "batch_size": BATCH}


def setting(shape: Shape, clients: int, rounds: int) -> tuple[Run, Model, Federation]:
    key = Key(0)
    task = data.load("synthetic", key, examples=clients * EXAMPLES, size=shape.pixels, channels=3)
    federation = data.split(task, "iid", clients=clients, key=key)
    model = models.build("vit", task, key, layers=shape.layers, width=shape.width, heads=HEADS, patch=shape.patch)
    training = Training(LR, AdamW(weight_decay=WEIGHT_DECAY), **FIXED)
    return Run(methods.build("fedavg"), training, rounds=rounds, key=key, drift=False), model, federation


def lay_out(shape: Shape, run: Run, model: Model, federation: Federation) -> Work:
    """For those who do not know partita's keys: every batch of every round."""
    parts = []
    for client in federation.clients:
        examples = federation[client].train
        draws = [run.key / "round" / number / "client" / client / "batches" / 0 for number in range(run.rounds)]
        batches = [torch.stack(list(shuffled_batches(len(examples), run.training, None, draw))) for draw in draws]
        parts.append(Part(*whole(examples), torch.stack(batches)))
    return Work(shape, configure_backends("auto"), dict(model.initial), tuple(parts), whole(federation.test))


def whole(examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
    batch = examples.take(torch.arange(len(examples)))
    return batch.inputs["pixel_values"], batch.targets
