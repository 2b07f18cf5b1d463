"""Shared test helpers: small federations, a plain torch.optim loop, a scripted engine and simple rules."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from partita.core.batch_schedule import shuffled_batches
from partita.core.client import Job
from partita.core.data import ClientData, Examples
from partita.core.method import Method
from partita.core.model import Model
from partita.core.optim import SGD, AdamW, Optimizer
from partita.core.rng import Key
from partita.core.rounds import ClientFailure, RoundResult, rounds
from partita.core.server_rule import Server, ServerRule
from partita.core.settings import FederationSettings, Run, Training
from partita.core.tensors import Slots, Tensors
from partita.core.update import Aggregate, Update
from partita.engines.simulation import SimulationEngine
from partita.experiment.builder import build
from partita.experiment.config import Config, load, parse
from partita.experiment.runner import restore_secret
from partita.record import file_names
from partita.storage import checkpoint
from partita.storage.atomic_files import list_checksummed
from partita.testing.toy import ToyExamples, ToyTransformer

# A config table: the smallest ViT for 4 x 4 images.
SMALL_VIT = """
[model]
name = "vit"
layers = 1
width = 8
heads = 2
patch = 2
"""
# The last table is open, so that a test can append test_examples or classes.
SMALL_TASK = """
[training]
optimizer = "sgd"
lr = 0.1
[split]
name = "iid"
clients = 3
[data]
name = "synthetic"
examples = 120
size = 4
"""
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(weight_decay=0.1),
    "momentum": SGD(momentum=0.9),
    "nesterov": SGD(momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": AdamW(weight_decay=0.1),
}
KERNEL = ToyTransformer(width=4, layers=1).names("query", "key")


def small_config(method: str, count: int, **engine: object) -> Config:
    raw = tomllib.loads(SMALL_VIT + SMALL_TASK)
    return parse({**raw, "method": {"name": method}, "rounds": count, "engine": engine})


class Clients:
    """Clients by name, each with the given number of examples."""

    def __init__(self, **sizes: int) -> None:
        self.clients = tuple(sizes)
        self.parts = {}
        for client, size in sizes.items():
            draw = (Key(3) / client).generator()
            x = torch.randn(size, 4, 4, generator=draw)
            self.parts[client] = ToyExamples(x, (x.sum((1, 2)) > 0).long() + (x[:, 0, 0] > 0.5).long())

    def __getitem__(self, client: str) -> ClientData:
        part = self.parts[client]
        return ClientData(part, part, part)


def toy_model() -> ToyTransformer:
    return ToyTransformer(width=4, layers=1)


def toy_run(
    method: Method, count: int = 3, optimizer: Optimizer | None = None, lr: float = 0.05, seed: int = 7, **more: object
) -> Run:
    """A run; options of Training and of FederationSettings go to these, all others to Run."""
    own = {key: more.pop(key) for key in list(more) if key in Training.__dataclass_fields__}
    federation = {key: more.pop(key) for key in list(more) if key in FederationSettings.__dataclass_fields__}
    training = Training(lr=lr, optimizer=optimizer or SGD(), **{"batch_size": 4, **own})  # type: ignore[arg-type]
    return Run(method, training, count, Key(seed), FederationSettings(**federation), **more)  # type: ignore[arg-type]


def with_federation(run: Run, **changes: object) -> Run:
    return replace(run, federation=replace(run.federation, **changes))  # type: ignore[arg-type]


def play(
    run: Run, model: Model, population: object, server: Server | None = None, start: int = 0, **engine: object
) -> list[RoundResult]:
    made = SimulationEngine(run, model, population, **engine)  # type: ignore[arg-type]
    return list(rounds(run, model, made, server, start))


def final_params(played: Sequence[RoundResult]) -> Tensors:
    return played[-1].server.params


class TorchLoop:
    """A plain training loop: one model, one torch.optim optimizer, given batches."""

    def __init__(self, model: Model, training: Training, start: Tensors | None = None) -> None:
        self.model, self.training = model, training
        self.params = {name: value.clone().requires_grad_() for name, value in sorted((start or model.initial).items())}
        self.renew()

    def renew(self) -> None:
        """Create a new optimizer for the same parameters."""
        ours, values = self.training.steps_by, list(self.params.values())
        if isinstance(ours, SGD):
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
                values, self.training.lr, momentum=ours.momentum, weight_decay=ours.weight_decay, nesterov=ours.nesterov
            )
        else:
            assert isinstance(ours, AdamW)
            self.optimizer = torch.optim.AdamW(
                values, self.training.lr, (ours.beta1, ours.beta2), eps=ours.eps, weight_decay=ours.weight_decay
            )

    def fit(self, examples: Examples, batches: Iterable[Tensor]) -> list[float]:
        losses = []
        for indices in batches:
            batch = examples.take(indices)
            self.optimizer.zero_grad()
            loss = self.model.losses(self.model(self.params, batch.inputs), batch.targets).mean()
            loss.backward()
            if self.training.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.params.values(), self.training.clip)
            self.optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    def values(self) -> Tensors:
        return {name: value.detach() for name, value in self.params.items()}


def client_batches(run: Run, number: int, client: str, examples: Examples) -> list[Tensor]:
    key = run.key / "round" / number / "client" / client / "batches" / 0
    return list(shuffled_batches(len(examples), run.training, None, key))


def max_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@dataclass(frozen=True)
class ServerMomentum(ServerRule):
    """Server momentum: the server keeps a velocity of the aggregated deltas."""

    beta: float = 0.5

    def init(self, model: Model) -> Slots:
        return {"velocity": {name: torch.zeros_like(value) for name, value in model.initial.items()}}

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        old = server.state["velocity"]
        new = {name: self.beta * old[name] + value for name, value in aggregate.delta.items()}
        server = super().apply(server, replace(aggregate, delta=new))
        return replace(server, state={"velocity": {**old, **new}})


@dataclass
class ScriptedEngine:
    """An engine whose clients reply with a function of the job."""

    answer: Callable[[Job], Update | ClientFailure]
    names: Sequence[str] = ("a", "b")
    jobs: list[Job] = field(default_factory=list)

    def clients(self) -> Sequence[str]:
        return self.names

    def train(self, jobs: Iterable[Job]) -> Iterator[Update | ClientFailure]:
        for job in jobs:
            self.jobs.append(job)
            yield self.answer(job)

    def evaluate(self, jobs: Iterable[Job]) -> Iterator[tuple[str, dict[str, float]]]:
        raise NotImplementedError


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@contextmanager
def no_vmap_fallback() -> Iterator[None]:
    """Fail if vmap falls back to running an operation client by client."""
    torch._C._debug_only_display_vmap_fallback_warnings(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        torch._C._debug_only_display_vmap_fallback_warnings(False)


def server_in(folder: Path) -> Server:
    """The server in the newest checkpoint of a run folder."""
    config = load(folder / file_names.CONFIG)
    experiment = build(config, restore_secret(config, folder))
    path = list_checksummed(folder / file_names.CHECKPOINTS)[-1]
    return checkpoint.read(path, initial=experiment.initial_values).server
