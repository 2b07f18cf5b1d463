"""The engine of Trainers, and the orders that it gives: in this process, in another thread, and to other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import distributed

from partita.core.client import ClientError, ClientState, Job
from partita.core.data import EvaluateOn
from partita.core.rng import Key, seeded
from partita.core.rounds import ClientFailure
from partita.core.settings import Run, RunError
from partita.core.tensors import Tensors
from partita.core.update import Update
from partita.engines.availability import Availability
from partita.storage.client_store import ClientStore
from partita.trainers.model import TrainerModel
from partita.trainers.site import TrainerSite

T = TypeVar("T")
Test = Callable[[Any], Mapping[str, float]]  # a module, in evaluation mode -> its scores


@dataclass(frozen=True)
class Order:
    """What one client is to do.

    Attributes:
        kind: "train" and answer; "score" its own model by `trainer.evaluate()`; "test" it by the central test.
        job: The round and the parameters.
        state: What stays with the client.
    """

    kind: Literal["train", "score", "test"]
    job: Job
    state: ClientState


CarryOut = Callable[[Order], Any]


class TrainerEngine:
    """Engine whose clients are Trainers. One trains after the other.

    Args:
        run: The run.
        clients: The names of the clients.
        store: The store of the clients' state.
        carry_out: Carries out an order and returns its result.
        availability: Simulated dropouts.
    """

    def __init__(
        self, run: Run, clients: Sequence[str], store: ClientStore, carry_out: CarryOut, availability: Availability
    ) -> None:
        self.run, self.names, self.store, self.carry_out = run, clients, store, carry_out
        self.availability = availability

    def clients(self) -> Sequence[str]:
        return self.names

    def train(self, jobs: Iterable[Job]) -> Iterator[Update | ClientFailure]:
        for job in jobs:
            if self.availability.completed_fraction(self.run.key, job.round, job.client) == 0:
                yield ClientFailure(job.client, "dropped out (simulated)")
                continue
            try:
                update, state = self.carry_out(Order("train", job, self.store.load(job.client, job.round)))
            except ClientError as error:
                if not self.run.federation.skip_failed_clients:
                    raise
                yield ClientFailure(error.client, error.reason)
                continue
            if state.personal or state.memory:
                self.store.save(job.client, job.round, state)
            yield update

    def evaluate(self, jobs: Iterable[Job], on: EvaluateOn = None) -> Iterator[tuple[str, dict[str, float]]]:
        for job in jobs:
            state = self.store.load(job.client, job.round + 1)
            if scores := self.carry_out(Order("score" if on is None else "test", job, state)):
                yield job.client, scores


@dataclass(frozen=True)
class Crew:
    """The sites of this process.

    Attributes:
        run: The run.
        model: The names and initial values of the parameters.
        sites: The clients.
        test: The central test; None for none.
    """

    run: Run
    model: TrainerModel
    sites: Mapping[str, TrainerSite]
    test: Test | None = None

    def carry_out(self, order: Order) -> Any:
        """Carry out an order; to train, call the Trainer's `train()`."""
        if order.kind == "train":
            self.begin(order)
            site = self.sites[order.job.client]
            site.trainer.train()
            return site.finish()
        return self.score(order)

    def begin(self, order: Order) -> None:
        """Begin the training of an order. `train()` and `TrainerSite.finish` follow."""
        self.sites[order.job.client].begin(self.run, self.model, order.job, order.state)

    def score(self, order: Order) -> dict[str, float]:
        """Score the client's model, as it is after the round."""
        site = self.sites[order.job.client]
        site.put_own(self.run, self.model, order.job, order.state)
        if order.kind == "score":
            return site.scores()
        return run_test(self.test, site.trainer) if self.test else {}


def made(trainer: Any) -> Any:
    """Return a Trainer, or the one that a function makes; its random draws are the same at all parties."""
    if not callable(trainer):
        return trainer
    with seeded(Key(0)):
        return trainer()


def run_test(test: Test, trainer: Any) -> dict[str, float]:
    """Return the scores of the central test on the module of a Trainer.

    Raises:
        RunError: If it returns anything but numbers by name.
    """
    if not trainer.is_world_process_zero() and not trainer.is_fsdp_enabled:  # all run a sharded model together
        return {}
    module = trainer.model.eval()
    with torch.no_grad():
        scores = test(module)
    if not isinstance(scores, Mapping) or not all(isinstance(value, int | float) for value in scores.values()):
        raise RunError(f"test returned {str(scores)[:60]}; it must return a dict of numbers by name")
    return {str(name): float(value) for name, value in scores.items()}


class Ranks:
    """The processes that train one client together. The first one has the federation, and tells the others.

    Args:
        device: The device of this process.
        model: The names, shapes and types of the parameters, which are the same everywhere.
    """

    def __init__(self, device: torch.device, model: TrainerModel) -> None:
        self.device, self.model = device, model
        self.several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        self.first = not self.several or distributed.get_rank() == 0

    def share(self, order: Order | str | None) -> Order | str | None:
        """Return what the first process passes: an order, the reason of a failure, or None at the end."""
        params = order.job.params if isinstance(order, Order) else {}
        head = replace(order, job=replace(order.job, params={})) if isinstance(order, Order) else order
        head, names = self.agree((head, sorted(params)))
        if not isinstance(head, Order):
            return head
        return replace(head, job=replace(head.job, params=self.copy(params, names)))

    def agree(self, value: T) -> T:
        """Return the value of the first process."""
        values = [value]
        if self.several:
            distributed.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def copy(self, params: Tensors, names: Iterable[str]) -> Tensors:
        """Return the parameters of the first process in all of them; the others need none."""
        if not self.several:
            return params
        copies: dict[str, torch.Tensor] = {}
        for name in sorted(names):
            there = (params[name] if self.first else torch.empty_like(self.model.initial[name])).to(self.device)
            distributed.broadcast(there, src=0)
            copies[name] = there.cpu()
        return copies
