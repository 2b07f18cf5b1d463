"""FedLab's standalone simulation, with its serial trainer and synchronous server: play_fedlab.py WORK FINAL."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any

import torch

# FedLab imports torchvision for data sets that are not used here, and a build of torchvision that does not fit this
# torch cannot load its kernels; it imports all the same once those it asks for are declared.
for kernel in ("nms", "qnms"):
    with contextlib.suppress(RuntimeError):
        torch.library.define(f"torchvision::{kernel}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler  # noqa: E402
from fedlab.contrib.dataset.basic_dataset import BaseDataset, FedDataset  # noqa: E402
from fedlab.core.standalone import StandalonePipeline  # noqa: E402
from fedlab.utils import Aggregators, SerializationTool  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from work import LR, WEIGHT_DECAY, Told, Work, load, started  # noqa: E402


class Logits(torch.nn.Module):
    """FedLab's trainer expects a module that answers with a tensor."""

    def __init__(self, vit: Any) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.vit(x).logits


class Dealt(FedDataset):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.parts, self.round = work.parts, 0

    def get_dataset(self, id: int, type: str = "train") -> BaseDataset:
        return BaseDataset(self.parts[id].images, self.parts[id].labels)

    def get_dataloader(self, id: int, batch_size: int | None = None, type: str = "train") -> DataLoader[Any]:
        return DataLoader(self.get_dataset(id), batch_sampler=self.parts[id].batches[self.round].tolist())


class Trainer(FedAvgSerialClientTrainer):
    """FedLab's, but with AdamW, fresh for each client, and with the client's number of examples in what it uploads."""

    def train(self, model_parameters: torch.Tensor, train_loader: DataLoader[Any]) -> list[torch.Tensor]:
        self.optimizer = torch.optim.AdamW(self._model.parameters(), lr=self.lr, weight_decay=WEIGHT_DECAY)
        return [*super().train(model_parameters, train_loader), torch.tensor(len(train_loader.dataset))]  # type: ignore[arg-type]


class Server(FedAvgServerHandler):
    """FedLab's, but with a mean weighted by the numbers of examples."""

    def global_update(self, buffer: list[list[torch.Tensor]]) -> None:
        values, sizes = zip(*buffer, strict=True)
        mean = Aggregators.fedavg_aggregate(list(values), torch.stack(sizes).float())
        SerializationTool.deserialize_model(self._model, mean)


class Pipeline(StandalonePipeline):
    def __init__(self, handler: Server, trainer: Trainer, told: Told) -> None:
        super().__init__(handler, trainer)
        self.told = told

    def evaluate(self) -> None:
        """FedLab calls it after each round."""
        self.told.round()
        self.trainer.dataset.round += 1
        if not self.handler.if_stop:
            self.told.wait()


def main() -> None:
    told, work = Told(), load(sys.argv[1])
    logging.disable()
    model = Logits(started(work))
    trainer = Trainer(model, len(work.parts))
    trainer.setup_dataset(Dealt(work))
    trainer.setup_optim(epochs=1, batch_size=work.parts[0].batches.shape[2], lr=LR)
    server = Server(model, work.rounds, sample_ratio=1.0)
    pipeline = Pipeline(server, trainer, told)
    told.ready()
    told.wait()
    pipeline.main()
    told.done(dict(server.model.vit.named_parameters()), sys.argv[2])


if __name__ == "__main__":
    main()
