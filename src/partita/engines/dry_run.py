"""A run without its arithmetic: the same rounds, plans, ledger and messages, so that bytes are known beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from torch import Tensor

from partita.core import tensors
from partita.core.client import ClientState, Job, Learned, reply, visit
from partita.core.data import Batch, Examples
from partita.core.method import MethodError, Server, Update
from partita.core.model import Model
from partita.core.rounds import Lost, begin, rounds
from partita.core.settings import Run
from partita.engines.availability import Faults


class _One:
    """A single example that nobody looks at."""

    def __len__(self) -> int:
        return 1

    def take(self, indices: Tensor) -> Batch:
        return Batch({}, indices)


class Rehearsal:
    """An engine whose clients answer at once with the model unchanged."""

    def __init__(self, run: Run, model: Model, clients: Sequence[str], faults: Faults | None = None) -> None:
        for rule in run.method.local:
            if rule.looks:
                raise MethodError(
                    f"{run.method.name} narrows its plan by looking at data, so it cannot be rehearsed; for as many "
                    "bytes, choose without looking: of safl, set method.select = 'random'"
                )
        self.run, self.model, self.names, self.faults = run, model, clients, faults or Faults()

    def clients(self) -> Sequence[str]:
        return self.names

    def train(self, jobs: Iterable[Job]) -> Iterator[Update | Lost]:
        for job in jobs:
            if self.faults.work(self.run.key, job.round, job.client) == 0:
                yield Lost(job.client, "dropped out (simulated)")
                continue
            yield answer(self.run, self.model, job)

    def evaluate(self, jobs: Iterable[Job], on: Examples | None = None) -> Iterator[tuple[str, dict[str, float]]]:
        raise MethodError("a rehearsal trains nothing, so there is nothing to evaluate")


def answer(run: Run, model: Model, job: Job) -> Update:
    """The update of a client whose training changed nothing: of the right names and shapes."""
    each = visit(run, model, job, ClientState(), _One())
    still = tensors.select(each.ctx.anchor, each.plan.train)
    delta = tensors.zeros_like(tensors.select(still, each.plan.up))
    return reply(run, each, Learned(still, dict.fromkeys(still, 1), [0.0], {}, delta))[0]


def rehearse(run: Run, model: Model, clients: Sequence[str], until: int, faults: Faults | None = None) -> Server:
    """The server as it stands, ledger and all, before round `until`."""
    quiet = replace(run, drift=False)
    server = begin(quiet, model)
    for each in islice(rounds(quiet, model, Rehearsal(quiet, model, clients, faults), server), until):
        server = each.server
    return server
