"""A loop in the manner of PFLlib, which is no package one could install: one object for each client with a model of its
own, a copy of the model travels, a DataLoader deals single examples. Written for this benchmark: play_pfllib_style.py
WORK FINAL.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader
from work import LR, WEIGHT_DECAY, Part, Told, load, started


class Client:
    def __init__(self, model: Any, part: Part) -> None:
        self.model = copy.deepcopy(model)
        self.part = part
        self.examples = list(zip(part.images, part.labels, strict=True))
        self.loss = torch.nn.CrossEntropyLoss()

    def set_parameters(self, model: Any) -> None:
        for mine, new in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.data = new.data.clone()

    def train(self, number: int) -> None:
        dealt = self.part.batches[number].tolist()
        loader: DataLoader[Any] = DataLoader(self.examples, batch_sampler=dealt)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
        self.model.train()
        for x, y in loader:
            loss = self.loss(self.model(x).logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class Server:
    def __init__(self, model: Any, clients: list[Client]) -> None:
        self.model, self.clients = model, clients

    def play(self, number: int) -> None:
        for client in self.clients:
            client.set_parameters(self.model)
            client.train(number)
        sizes = [len(client.part.labels) for client in self.clients]
        uploaded = [client.model for client in self.clients]
        self.model = copy.deepcopy(uploaded[0])
        for value in self.model.parameters():
            value.data.zero_()
        for size, model in zip(sizes, uploaded, strict=True):
            for mean, value in zip(self.model.parameters(), model.parameters(), strict=True):
                mean.data += value.data.clone() * (size / sum(sizes))


def main() -> None:
    told, work = Told(), load(sys.argv[1])
    model = started(work)
    server = Server(model, [Client(model, part) for part in work.parts])
    told.ready()
    for number in range(work.rounds):
        told.wait()
        server.play(number)
        told.round()
    told.done(dict(server.model.named_parameters()), sys.argv[2])


if __name__ == "__main__":
    main()
