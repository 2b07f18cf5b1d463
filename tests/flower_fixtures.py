"""A Flower grid within one process, and ways to tamper with the replies of its sites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from helpers import Clients

from partita.core.data import Population
from partita.core.model import Model
from partita.core.settings import Run
from partita.engines.availability import Availability
from partita.engines.flower import mailbox, messages, server
from partita.engines.flower.client import client_app
from partita.engines.flower.server import FlowerEngine
from partita.engines.flower.site import Site
from partita.evaluation import ACCURACY

THREE = Clients(c0=2, c1=4, c2=3)
CPU = torch.device("cpu")
ANY_SIZE = messages.Size(10**9, 10**9)
Reply = Callable[[Message], Message | None]


@pytest.fixture(autouse=True)
def task_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower gives every process an identity; here the server and all sites share one."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class VirtualClock:
    """Time for a server that passes only when it sleeps, so that no deadline depends on the load of the machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """The clock of the server and its mailbox."""
    clock = VirtualClock()
    for module in (server, mailbox):
        monkeypatch.setattr(module, "time", clock)
    return clock


def through_bytes(message: Message) -> Message:
    """The message after serialization and deserialization by Flower."""
    name = message.object_id
    contents = {key: part.deflate() for key, part in get_all_nested_objects(message).items()}
    arrived = inflate_object_from_contents(name, contents)
    assert isinstance(arrived, Message)
    arrived.metadata.__dict__["_message_id"] = name
    return arrived


@dataclass
class MessageSizes:
    """Sizes of training messages: bytes of tensors, and bytes of the rest."""

    tensors: Counter[str] = field(default_factory=Counter)
    rest: Counter[str] = field(default_factory=Counter)

    def weigh(self, message: Message, way: str) -> None:
        if message.metadata.message_type != "train" or message.has_error() or "tensors" not in message.content:
            return
        if not isinstance(record := message.content["tensors"], ArrayRecord):
            return
        blobs = sum(len(array.data) for array in record.values())
        whole = sum(len(part.deflate()) for part in get_all_nested_objects(message).values())
        self.tensors[way] += blobs
        self.rest[way] += whole - blobs


@dataclass
class FakeGrid(Grid):
    """A grid that only passes messages: a node replies at once, and the reply waits until it is pulled."""

    nodes: dict[int, Reply]
    replies: dict[str, Message] = field(default_factory=dict)
    scale: MessageSizes = field(default_factory=lambda: MessageSizes())
    fetching: Callable[[Message], None] = lambda reply: None
    registered: dict[int, str] = field(default_factory=dict)  # node -> the name under which its key is registered

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, name=self.registered.get(node)) for node in self.nodes]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message in messages:
            arrived = through_bytes(message)
            self.scale.weigh(arrived, "down")
            if reply := self.nodes[message.metadata.dst_node_id](arrived):
                self.replies[arrived.metadata.message_id] = reply
            yield arrived.metadata.message_id

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for reply in [self.replies.pop(name) for name in message_ids if name in self.replies]:
            self.fetching(reply)
            self.scale.weigh(reply, "up")
            yield through_bytes(reply)

    def set_run(self, run: object) -> None: ...
    def run(self) -> Any: ...  # type: ignore[override]
    def create_message(self, *given: object) -> Any: ...
    def send_and_receive(self, *given: object, **more: object) -> Any: ...


def make_site(
    run: Run,
    model: Model,
    population: Population,
    folder: Path,
    client: str,
    availability: Availability,
    keys: Path | None = None,
) -> Reply:
    """Every message gets a new app and new objects, as in a separate process."""

    def answer(message: Message) -> Message:
        def site(context: Context) -> Site:
            everyone = tuple(population.clients)
            own = population[client], folder / client, availability, CPU, ACCURACY
            return Site(run, model, client, *own, peers=everyone, key=keys / client if keys else None)

        context = Context(1, message.metadata.dst_node_id, {"client": client}, RecordDict(), {})
        return client_app(lambda context: str(context.node_config["client"]), site)(message, context)

    return answer


def make_grid(
    run: Run,
    model: Model,
    population: Population,
    folder: Path,
    availability: Availability = Availability(),  # noqa: B008
    keys: Path | None = None,
) -> FakeGrid:
    """A grid whose node order differs from the client order."""
    places = enumerate(reversed(population.clients), start=10)
    facts = run, model, population, folder
    return FakeGrid({node: make_site(*facts, client, availability, keys) for node, client in places})


def flower_engine(run: Run, model: Model, grid: FakeGrid, clients: Iterable[str], **more: Any) -> FlowerEngine:
    names = list(clients)
    return FlowerEngine(
        run, model, names, grid, **{"session": "1", "deadline": 5.0, "poll": 0.001, "wait_for": len(names)} | more
    )


Tamper = Callable[[Message, Message], Message | None]  # (request, honest reply) -> reply that arrives


def tamper_with(grid: FakeGrid, node: int, tamper: Tamper, when: int = 0) -> None:
    honest = grid.nodes[node]

    def answer(message: Message) -> Message | None:
        reply = honest(message)
        hit = message.metadata.message_type == "train" and message.metadata.group_id == str(when)
        return tamper(message, reply) if hit and reply else reply

    grid.nodes[node] = answer


def rewrite(**changes: Any) -> Tamper:
    """Change fields of the update; a callable gets the old value."""

    def tamper(message: Message, reply: Message) -> Message:
        update = messages.decode_update(reply.content, messages.decode_job_id(reply.content), ANY_SIZE)
        new = {name: change(getattr(update, name)) if callable(change) else change for name, change in changes.items()}
        content = messages.with_job_id(messages.encode_update(replace(update, **new)), message.content)
        return Message(content, reply_to=message)

    return tamper


def blob(change: Callable[[bytes], bytes], stype: str = "safetensors") -> Tamper:
    def tamper(message: Message, reply: Message) -> Message:
        data = change(reply.content["tensors"]["blob"].data)  # type: ignore[index]
        content = RecordDict({**reply.content, "tensors": ArrayRecord({"blob": Array("uint8", (1,), stype, data)})})
        return Message(content, reply_to=message)

    return tamper


def records(**changes: Any) -> Tamper:
    return lambda message, reply: Message(RecordDict({**reply.content, **changes}), reply_to=message)
