"""Simulation of all clients on one machine, one at a time or in blocks with vmap."""

from __future__ import annotations

import gc
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TypeVar

import torch

from partita.core import serialization, tensors
from partita.core.client import (
    ClientError,
    ClientRound,
    Job,
    LocalResult,
    adaptation_round,
    begin_round,
    client_model,
    client_params,
    finish_round,
    phases_before_test,
)
from partita.core.data import EvaluateOn, Examples, NewClasses, Population, TableExamples
from partita.core.model import Model, logits_and_losses
from partita.core.plan import Phase
from partita.core.rounds import ClientFailure
from partita.core.settings import Run, RunError
from partita.core.tensors import Tensors
from partita.core.update import Update
from partita.engines.availability import Availability
from partita.engines.determinism import go_on_without, strict_steps
from partita.engines.first_step import SMALLER, clients_of, out_of_memory
from partita.evaluation import ACCURACY, Evaluator, score
from partita.storage.client_store import ClientStore, MemoryStore
from partita.training.cuda_graphs import GraphCache
from partita.training.local_training import group_key, start_training
from partita.training.phase_trainer import PhaseTrainer

T = TypeVar("T")
EXAMPLES_KEPT = 4096  # maximum number of clients whose training rows are cached; the population may be large


class SimulationEngine:
    """Engine that trains all clients in this process.

    Args:
        run: The run.
        model: The model.
        population: The clients' data.
        block: Number of clients that train together; halved where so many do not fit in memory.
        device: The device. Default: the CPU.
        store: Store of the clients' state. Default: in memory.
        availability: Simulated dropouts and stragglers. Default: none.
        wire: Serialize and deserialize every message, and let every client keep its own copy of what it was sent, as
            a remote client would. This is slower, and proves that the transmitted bytes are sufficient.
        evaluator: Metrics of the task.
        graphs: Cache of CUDA graphs or compiled steps. Default: eager steps.
    """

    def __init__(
        self,
        run: Run,
        model: Model,
        population: Population,
        block: int = 1,
        device: torch.device | None = None,
        store: ClientStore | None = None,
        availability: Availability | None = None,
        wire: bool = False,
        evaluator: Evaluator = ACCURACY,
        graphs: GraphCache | None = None,
    ) -> None:
        self.run, self.model, self.population, self.block = run, model, population, block
        self.device = device or torch.device("cpu")
        self.store, self.availability, self.wire = store or MemoryStore(), availability or Availability(), wire
        self.evaluator, self.make_trainer = evaluator, graphs or PhaseTrainer
        self.forward = graphs.forward if graphs else logits_and_losses
        # Blocks launched in advance. On a CPU they would only use memory.
        self.blocks_ahead = int(self.device.type == "cuda")
        self.copies: dict[str, Tensors] = {}
        self.rows: dict[str, Examples] = {}
        model.to(self.device)

    def clients(self) -> Sequence[str]:
        return self.population.clients

    def train(self, jobs: Iterable[Job]) -> Iterator[Update | ClientFailure]:
        """Train the jobs' clients and yield one reply per job, in order.

        On a GPU, the next block is launched before the replies of the last one are collected, so that the GPU does not
        idle.
        """
        launched: deque[Iterator[Update | ClientFailure]] = deque()
        rest = iter(jobs)
        while chunk := list(islice(rest, self.block)):
            replies = self._train(chunk, alone=not launched)
            if replies is None:  # again, with what is different now
                rest = chain(chunk, rest)
            else:
                launched.append(replies)
            while len(launched) > (self.blocks_ahead if replies else 0):
                yield from launched.popleft()
        for replies in launched:
            yield from replies

    def _train(self, jobs: Sequence[Job], alone: bool) -> Iterator[Update | ClientFailure] | None:
        """Launch the training of a block. Return None if it has to be launched once more."""
        client_rounds = [self._begin(job) for job in jobs]
        wait = self._launch(self.run, [item for item in client_rounds if isinstance(item, ClientRound)], alone)
        if wait is None:
            return None

        def replies() -> Iterator[Update | ClientFailure]:
            results = iter(wait())
            for item in client_rounds:
                yield item if isinstance(item, ClientFailure) else self._reply(item, next(results))

        return replies()

    def evaluate(self, jobs: Iterable[Job], on: EvaluateOn = None) -> Iterator[tuple[str, dict[str, float]]]:
        """Score each client's model on its own test examples, its own validation examples, or the examples `on`.

        New classes are scored with a model that has their names in place of the names of training.
        """
        base = self.model.for_classes(on.classes) if isinstance(on, NewClasses) else self.model
        rest = iter(jobs)
        while chunk := list(islice(rest, self.block)):
            tested = self._params_to_test(chunk)
            if tested is None:  # again, with what is different now
                rest = chain(chunk, rest)
                continue
            for job, params in zip(chunk, tested, strict=True):
                examples = self._examples(job.client, on)
                model = client_model(self.run, base, job)
                yield job.client, score(model, model.personal(params), examples, self.evaluator, self.forward)

    def _params_to_test(self, jobs: Sequence[Job]) -> list[Tensors] | None:
        """Return all parameters of each client's model, after what it trains before a test; None to ask once more."""
        full = [self._all_params(job) for job in jobs]
        phases = [phases_before_test(self.run, self.model, job) for job in jobs]
        places = [place for place, own in enumerate(phases) if own]
        if not places:
            return full
        # Plain training: the method's client rules apply to its own rounds only.
        plain = replace(
            self.run,
            method=replace(self.run.method, client_rules=(), carry_optimizer=False),
            training=replace(self.run.training, keep_optimizer=False),
        )
        wait = self._launch(plain, [self._adaptation(jobs[place], phases[place]) for place in places])
        if wait is None:
            return None
        for place, own in zip(places, wait(), strict=True):
            full[place] = {**full[place], **own.params}
        return full

    def _examples(self, client: str, on: EvaluateOn) -> Examples:
        if isinstance(on, NewClasses):
            return on.examples
        if on is None:
            return self.population[client].test
        return self.population[client].validation if isinstance(on, str) else on

    def _adaptation(self, job: Job, phases: tuple[Phase, ...]) -> ClientRound:
        state = self.store.load(job.client, job.round + 1)
        return adaptation_round(self.run, self.model, job, state, self.population[job.client].train, phases)

    def _all_params(self, job: Job) -> Tensors:
        """Return all parameters of the client's model, with its state after the job's round."""
        return client_params(self.run, self.model, job, self.store.load(job.client, job.round + 1))[1]

    def _begin(self, job: Job) -> ClientRound | ClientFailure:
        fraction = self.availability.completed_fraction(self.run.key, job.round, job.client)
        if fraction == 0:
            return ClientFailure(job.client, "dropped out (simulated)")
        state = self.store.load(job.client, job.round)
        try:
            return begin_round(
                self.run, self.model, self._through_wire(job), state, self._train_part(job.client), fraction
            )
        except ClientError as error:
            return self._failure(error)

    def _train_part(self, client: str) -> Examples:
        """Return the client's training examples. Table rows are cached: they are small, and rebuilding stalls a GPU."""
        if client in self.rows:
            return self.rows[client]
        examples = self.population[client].train
        if len(self.rows) < EXAMPLES_KEPT and isinstance(examples, TableExamples):
            self.rows[client] = examples
        return examples

    def _reply(self, client_round: ClientRound, result: LocalResult) -> Update | ClientFailure:
        try:
            update, state = finish_round(self.run, client_round, result)
        except ClientError as error:
            return self._failure(error)
        if state.personal or state.memory:
            self.store.save(client_round.job.client, client_round.job.round, state)
        return self._back_through_wire(update) if self.wire else update

    def _failure(self, error: ClientError) -> ClientFailure:
        if not self.run.federation.skip_failed_clients:
            raise error
        return ClientFailure(error.client, error.reason)

    def _launch(
        self, run: Run, client_rounds: Sequence[ClientRound], alone: bool = True
    ) -> Callable[[], list[LocalResult]] | None:
        """Launch the training of a block, in groups of clients with equal plans.

        Args:
            run: The run.
            client_rounds: What the clients begin with.
            alone: Whether no other block takes memory now.

        Returns:
            A function that waits for the results; None if the device refused something that is different from now on,
            such as the size of blocks.
        """
        groups: dict[Hashable, list[int]] = {}
        for place, client_round in enumerate(client_rounds):
            groups.setdefault(group_key(run, client_round), []).append(place)
        try:
            with strict_steps():
                waits = [
                    (places, start_training(run, [client_rounds[place] for place in places], self.make_trainer))
                    for places in groups.values()
                ]
        except torch.OutOfMemoryError as error:
            finding = self._halve(error, len(client_rounds), alone)
        except RuntimeError as error:
            finding = go_on_without(error)
            if not finding:
                raise
        else:

            def wait() -> list[LocalResult]:
                results = {
                    place: result for places, rest in waits for place, result in zip(places, rest(), strict=True)
                }
                return [results[place] for place in range(len(client_rounds))]

            return wait
        # After the error, whose traceback holds what the block allocated.
        if finding:
            warnings.warn(finding, stacklevel=2)
        if isinstance(self.make_trainer, GraphCache):
            self.make_trainer.known.clear()
        gc.collect()  # trainers refer to themselves
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _halve(self, error: torch.OutOfMemoryError, clients: int, alone: bool) -> str:
        """Train fewer clients together from now on, and return what to tell the user.

        Raises:
            RunError: If a single client does not fit in memory.
        """
        missing = out_of_memory(error)
        if clients > 1:
            self.block = clients // 2
            return f"{missing} while training {clients_of(clients)}; from now on it is {clients_of(self.block)}"
        if alone:
            more = ", or set engine.cuda_graphs = false" if isinstance(self.make_trainer, GraphCache) else ""
            raise RunError(f"{missing} while training one client; {SMALLER}{more}") from error
        self.blocks_ahead = 0
        return ""

    def _through_wire(self, job: Job) -> Job:
        if not self.wire:
            return job
        slots = serialization.unpack(serialization.pack({"params": tensors.select(job.params, job.stale), **job.slots}))
        slots = {slot: tensors.to(part, self.device) for slot, part in slots.items()}
        copy = self.copies.setdefault(job.client, {})
        copy.update(slots.pop("params", {}))
        return Job(job.round, job.client, tensors.select(copy, job.params.keys()), job.stale, slots, job.signal)

    def _back_through_wire(self, update: Update) -> Update:
        slots = serialization.unpack(serialization.pack({"delta": update.delta, **update.slots}))
        slots = {slot: tensors.to(part, self.device) for slot, part in slots.items()}
        return replace(update, delta=slots.pop("delta", {}), slots=slots)


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Split items into lists of `size`; the last one may be shorter."""
    stream = iter(items)
    while chunk := list(islice(stream, size)):
        yield chunk
