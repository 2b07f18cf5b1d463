"""pfl's simulation in one process: play_pfl.py WORK FINAL."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor
from torch.nn import functional
from work import LR, WEIGHT_DECAY, Part, Told, load, started


class Scored(torch.nn.Module):
    """pfl expects a module with these two methods."""

    def __init__(self, vit: Any) -> None:
        super().__init__()
        self.vit = vit

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.vit(x).logits, y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


class Dealt(Dataset):
    """Gives the batches of the round, in their order."""

    def __init__(self, part: Part, number: int) -> None:
        super().__init__((part.images, part.labels))
        self.part, self.number = part, number

    def iter(self, batch_size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in self.part.batches[self.number]:
            yield self.part.images[indices], self.part.labels[indices]


class Rounds(TrainingProcessCallback[Any]):
    def __init__(self, told: Told, count: int) -> None:
        self.told, self.count, self.number = told, count, 0

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.told.round()
        self.number = central_iteration + 1
        if self.number < self.count:
            self.told.wait()
        return False, Metrics()


def main() -> None:
    told, work = Told(), load(sys.argv[1])
    module = Scored(started(work))
    create = functools.partial(torch.optim.AdamW, weight_decay=WEIGHT_DECAY)
    model = PyTorchModel(module, create, torch.optim.SGD(module.parameters(), lr=1.0))
    rounds = Rounds(told, work.rounds)
    sampler = get_user_sampler("minimize_reuse", list(range(len(work.parts))))
    users = FederatedDataset(lambda user: Dealt(work.parts[user], rounds.number), sampler)
    backend = SimulatedBackend(users, users, [WeightByDatapoints()])
    _, steps, batch = work.parts[0].batches.shape
    told.ready()
    told.wait()
    FederatedAveraging().run(
        NNAlgorithmParams(
            # pfl evaluates each client before and after its training in the first round, whatever one says.
            central_num_iterations=work.rounds, evaluation_frequency=work.rounds, train_cohort_size=len(work.parts),
            val_cohort_size=0,
        ),
        backend,
        model,
        NNTrainHyperParams(
            local_num_epochs=None, local_num_steps=steps, local_learning_rate=LR, local_batch_size=batch
        ),
        NNEvalHyperParams(local_batch_size=batch),
        [rounds],
        send_metrics_to_platform=False,
    )  # fmt: skip
    told.done(dict(module.vit.named_parameters()), sys.argv[2])


if __name__ == "__main__":
    main()
