"""A run without its arithmetic: the same rounds, plans, ledger and messages, so that bytes are known beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from torch import Tensor

from partita.core import tensors
from partita.core.client import ClientState, Job, LocalResult, begin_round, finish_round
from partita.core.data import Batch, Examples
from partita.core.method import MethodError, Server, Update
from partita.core.model import Model
from partita.core.rounds import ClientFailure, initial_server, rounds
from partita.core.settings import Run
from partita.engines.availability import Availability


class _OneExample:
    """A single example that nobody looks at."""

    def __len__(self) -> int:
        return 1

    def take(self, indices: Tensor) -> Batch:
        return Batch({}, indices)


class DryRunEngine:
    """An engine whose clients answer at once with the model unchanged."""

    def __init__(
        self, run: Run, model: Model, clients: Sequence[str], availability: Availability | None = None
    ) -> None:
        for rule in run.method.client_rules:
            if rule.uses_data:
                raise MethodError(
                    f"{run.method.name} narrows its plan by looking at data, so it cannot be rehearsed; for as many "
                    "bytes, choose without looking: of safl, set method.select = 'random'"
                )
        self.run, self.model, self.names, self.availability = run, model, clients, availability or Availability()

    def clients(self) -> Sequence[str]:
        return self.names

    def train(self, jobs: Iterable[Job]) -> Iterator[Update | ClientFailure]:
        for job in jobs:
            if self.availability.completed_fraction(self.run.key, job.round, job.client) == 0:
                yield ClientFailure(job.client, "dropped out (simulated)")
                continue
            yield null_update(self.run, self.model, job)

    def evaluate(self, jobs: Iterable[Job], on: Examples | None = None) -> Iterator[tuple[str, dict[str, float]]]:
        raise MethodError("a rehearsal trains nothing, so there is nothing to evaluate")


def null_update(run: Run, model: Model, job: Job) -> Update:
    """The update of a client whose training changed nothing: of the right names and shapes."""
    each = begin_round(run, model, job, ClientState(), _OneExample())
    still = tensors.select(each.ctx.anchor, each.plan.train)
    delta = tensors.zeros_like(tensors.select(still, each.plan.up))
    return finish_round(run, each, LocalResult(still, dict.fromkeys(still, 1), [0.0], {}, delta))[0]


def dry_run(
    run: Run, model: Model, clients: Sequence[str], until: int, availability: Availability | None = None
) -> Server:
    """The server as it stands, ledger and all, before round `until`."""
    quiet = replace(run, drift=False)
    server = initial_server(quiet, model)
    for each in islice(rounds(quiet, model, DryRunEngine(quiet, model, clients, availability), server), until):
        server = each.server
    return server
