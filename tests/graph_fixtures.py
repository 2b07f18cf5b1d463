"""Small ViT runs with optional CUDA graphs, for CPU and GPU tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from partita import FederationSettings, Key, Run, SimulationEngine, Training, data, methods, models, rounds
from partita.core.model import Model
from partita.core.optim import Optimizer
from partita.core.tensors import Tensors
from partita.data import Federation
from partita.testing.trial import states_of
from partita.training.cuda_capture import Replay
from partita.training.cuda_graphs import GraphCache


class ReplayingRecorder:
    """Does no work while recording: each replay runs the work again into the same tensors."""

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(self, work: Callable[[], Tensor]) -> Replay:
        self.recorded += 1
        result = torch.empty(0)

        def replay() -> None:
            found = work()
            result.resize_(found.shape).copy_(found)

        return replay, result


def small_vit_run(
    method: str, optimizer: Optimizer, count: int = 4, **training: object
) -> tuple[Run, Model, Federation]:
    key = Key(3)
    task = data.load("synthetic", key, examples=90, size=8, channels=1)
    federation = data.split(task, "dirichlet", clients=5, alpha=0.5, key=key)
    model = models.build("vit", task, key, layers=1, width=8, heads=2, patch=4)
    settings = Training(1e-2, optimizer, **{"batch_size": 4, **training})  # type: ignore[arg-type]
    return Run(methods.build(method), settings, count, key, FederationSettings(4)), model, federation


def train_with_graphs(
    method: str,
    optimizer: Optimizer,
    graphs: GraphCache | None,
    block: int,
    count: int = 4,
    device: str = "cpu",
    ahead: int | None = None,
    **training: object,
) -> Tensors:
    run, model, federation = small_vit_run(method, optimizer, count, **training)
    engine = SimulationEngine(run, model, federation, block, torch.device(device), graphs=graphs)
    engine.blocks_ahead = engine.blocks_ahead if ahead is None else ahead
    played = list(rounds(run, model, engine))
    ended = {**played[-1].server.params, "losses": torch.tensor([each.loss for each in played])}
    for client, kept in states_of(run, engine).items():
        ended |= {f"{client} {name}": value for name, value in kept.items()}
    return ended


def max_relative_difference(left: Tensors, right: Tensors) -> float:
    # Softmax does not depend on key biases, so AdamW moves them by rounding alone.
    felt = [name for name in left if "k_proj.bias" not in name]
    return max(float((left[name] - right[name]).abs().max() / right[name].abs().max().clamp(min=1e-3)) for name in felt)
