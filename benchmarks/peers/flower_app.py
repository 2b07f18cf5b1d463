"""A Flower app for the current API: a server over the Grid, and a client, which share nothing but messages."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor
from torch.nn import functional
from work import LR, WEIGHT_DECAY, Work, load, started

client_app = ClientApp()
server_app = ServerApp()


@functools.cache
def held(path: str) -> tuple[Work, Any]:
    """A process that plays clients reads the work and builds the model once."""
    work = load(path)
    return work, started(work)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    config = message.content.config_records["config"]
    work, module = held(str(config["work"]))
    part = work.parts[int(context.node_config["partition-id"])]
    module.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    for indices in part.batches[int(str(config["round"]))]:
        loss = functional.cross_entropy(module(part.images[indices]).logits, part.labels[indices])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    content = RecordDict(
        {
            "arrays": ArrayRecord(dict(module.state_dict())),
            "about": MetricRecord({"examples": len(part.labels), "threads": torch.get_num_threads()}),
        }
    )
    return Message(content=content, reply_to=message)


def play(grid: Grid, path: str, clients: int, rounds: int, start: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The server's tensors after each round, which begins when they are asked for."""
    mean = start
    for number in range(rounds):
        while len(nodes := sorted(grid.get_node_ids())) < clients:
            time.sleep(0.1)  # they join one by one
        config = ConfigRecord({"work": path, "round": number})
        content = RecordDict({"arrays": ArrayRecord(mean), "config": config})
        messages = [Message(content=content, message_type=MessageType.TRAIN, dst_node_id=node) for node in nodes]
        replies = list(grid.send_and_receive(messages))
        if wrong := [reply.error.reason for reply in replies if reply.has_error()]:
            raise SystemExit(f"Flower lost {len(wrong)} clients: {wrong[0]}")
        sizes = [float(str(reply.content.metric_records["about"]["examples"])) for reply in replies]
        mean = {name: torch.zeros_like(value) for name, value in start.items()}
        for size, reply in zip(sizes, replies, strict=True):
            for name, value in reply.content.array_records["arrays"].to_torch_state_dict().items():
                mean[name] += value * (size / sum(sizes))
        yield mean


@torch.no_grad()
def accuracy(tensors: dict[str, Tensor], path: str) -> float:
    work, module = held(path)
    module.load_state_dict(tensors)
    images, labels = work.test
    return float((module.eval()(images).logits.argmax(1) == labels).float().mean())


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """For `flwr run`: all rounds, and one test at the end."""
    path = str(context.run_config["work"])
    work, _ = held(path)
    for mean in play(grid, path, len(work.parts), work.rounds, work.start):  # noqa: B007
        pass
    print(f"accuracy {accuracy(mean, path):.4f}")
