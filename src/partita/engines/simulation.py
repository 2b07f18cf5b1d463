"""All clients on one machine: one by one, or in blocks lifted with vmap."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
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
)
from partita.core.client_store import ClientStore, MemoryStore
from partita.core.data import Examples, Population, TableExamples
from partita.core.method import Update
from partita.core.model import Model
from partita.core.plan import Phase
from partita.core.rounds import ClientFailure
from partita.core.settings import Run, RunError
from partita.core.tensors import Tensors
from partita.engines.availability import Availability
from partita.evaluation import ACCURACY, Evaluator, score
from partita.training.cuda_graphs import GraphCache
from partita.training.local_training import group_key, start_training
from partita.training.phase_trainer import PhaseTrainer

T = TypeVar("T")
EXAMPLES_KEPT = 4096  # clients whose rows are kept for their next visit, out of a population that may be large


class SimulationEngine:
    """`block` clients train side by side; with `graphs`, by programs that a GPU records once and replays.

    With `wire`, every message is really packed and unpacked and every client keeps its own copy of what it was sent,
    as a remote one would: slower, and proof that the bytes suffice.
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
        self.ahead = int(self.device.type == "cuda")  # blocks; a CPU would only hold more
        self.copies: dict[str, Tensors] = {}
        self.rows: dict[str, Examples] = {}
        model.to(self.device)

    def clients(self) -> Sequence[str]:
        return self.population.clients

    def train(self, jobs: Iterable[Job]) -> Iterator[Update | ClientFailure]:
        """A GPU is given the next block before the last one is answered for, so that it never waits for us."""
        at_work: deque[Iterator[Update | ClientFailure]] = deque()
        for chunk in chunks(jobs, self.block):
            at_work.append(self._train(chunk))
            if len(at_work) > self.ahead:
                yield from at_work.popleft()
        for answers in at_work:
            yield from answers

    def _train(self, jobs: Sequence[Job]) -> Iterator[Update | ClientFailure]:
        client_rounds = [self._visit(job) for job in jobs]
        wait = self._launch(self.run, [each for each in client_rounds if isinstance(each, ClientRound)])

        def answers() -> Iterator[Update | ClientFailure]:
            learned = iter(wait())
            for each in client_rounds:
                yield each if isinstance(each, ClientFailure) else self._reply(each, next(learned))

        return answers()

    def evaluate(self, jobs: Iterable[Job], on: Examples | None = None) -> Iterator[tuple[str, dict[str, float]]]:
        """Each client's model on the client's own test part, or on the examples given."""
        for chunk in chunks(jobs, self.block):
            full = [self._full(job) for job in chunk]
            if self.run.method.adapt:
                # Plain training: the method's rules belong to its own rounds.
                plain = replace(self.run, method=replace(self.run.method, client_rules=(), carry_optimizer=False))
                trials = [self._trial(job, self.run.method.adapt(self.model)) for job in chunk]
                adapted = self._launch(plain, trials)()
                full = [{**params, **own.params} for params, own in zip(full, adapted, strict=True)]
            for job, params in zip(chunk, full, strict=True):
                examples = self.population[job.client].test if on is None else on
                yield job.client, score(client_model(self.run, self.model, job), params, examples, self.evaluator)

    def _trial(self, job: Job, phases: tuple[Phase, ...]) -> ClientRound:
        state = self.store.load(job.client, job.round + 1)
        return adaptation_round(self.run, self.model, job, state, self.population[job.client].train, phases)

    def _full(self, job: Job) -> Tensors:
        """The state after the job's round, not before it."""
        return client_params(self.run, self.model, job, self.store.load(job.client, job.round + 1))[1]

    def _visit(self, job: Job) -> ClientRound | ClientFailure:
        fraction = self.availability.completed_fraction(self.run.key, job.round, job.client)
        if fraction == 0:
            return ClientFailure(job.client, "dropped out (simulated)")
        state = self.store.load(job.client, job.round)
        try:
            return begin_round(self.run, self.model, self._carry(job), state, self._train_part(job.client), fraction)
        except ClientError as fault:
            return self._lost(fault)

    def _train_part(self, client: str) -> Examples:
        """Rows of a table are kept: they are a few numbers, and making them anew holds up a GPU."""
        if client in self.rows:
            return self.rows[client]
        examples = self.population[client].train
        if len(self.rows) < EXAMPLES_KEPT and isinstance(examples, TableExamples):
            self.rows[client] = examples
        return examples

    def _reply(self, each: ClientRound, learned: LocalResult) -> Update | ClientFailure:
        try:
            update, state = finish_round(self.run, each, learned)
        except ClientError as fault:
            return self._lost(fault)
        if state.personal or state.memory:
            self.store.save(each.job.client, each.job.round, state)
        return self._carry_back(update) if self.wire else update

    def _lost(self, fault: ClientError) -> ClientFailure:
        if not self.run.skip_failed_clients:
            raise fault
        return ClientFailure(fault.client, fault.reason)

    def _launch(self, run: Run, client_rounds: Sequence[ClientRound]) -> Callable[[], list[LocalResult]]:
        groups: dict[Hashable, list[int]] = {}
        for place, each in enumerate(client_rounds):
            groups.setdefault(group_key(run, each), []).append(place)
        waits = [(places, self._group(run, [client_rounds[place] for place in places])) for places in groups.values()]

        def wait() -> list[LocalResult]:
            learned = {place: each for places, rest in waits for place, each in zip(places, rest(), strict=True)}
            return [learned[place] for place in range(len(client_rounds))]

        return wait

    def _group(self, run: Run, client_rounds: Sequence[ClientRound]) -> Callable[[], list[LocalResult]]:
        try:
            return start_training(run, client_rounds, self.make_trainer)
        except torch.OutOfMemoryError as error:
            remedy = "lower engine.clients_per_block" if len(client_rounds) > 1 else "lower training.batch_size"
            remedy += ", or set engine.cuda_graphs = false" if isinstance(self.make_trainer, GraphCache) else ""
            raise RunError(f"{len(client_rounds)} clients side by side do not fit the memory; {remedy}") from error
        except RuntimeError as error:
            if "deterministic implementation" not in str(error):
                raise
            raise RunError(
                f"{self.model.name} does what has no deterministic form on a GPU: {str(error).partition(',')[0]}; "
                "set engine.deterministic = false, and last digits may differ from run to run"
            ) from error

    def _carry(self, job: Job) -> Job:
        if not self.wire:
            return job
        slots = serialization.unpack(serialization.pack({"params": tensors.select(job.params, job.stale), **job.slots}))
        slots = {slot: tensors.to(part, self.device) for slot, part in slots.items()}
        copy = self.copies.setdefault(job.client, {})
        copy.update(slots.pop("params", {}))
        return Job(job.round, job.client, tensors.select(copy, job.params.keys()), job.stale, slots, job.signal)

    def _carry_back(self, update: Update) -> Update:
        slots = serialization.unpack(serialization.pack({"delta": update.delta, **update.slots}))
        slots = {slot: tensors.to(part, self.device) for slot, part in slots.items()}
        return replace(update, delta=slots.pop("delta", {}), slots=slots)


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    stream = iter(items)
    while chunk := list(islice(stream, size)):
        yield chunk
