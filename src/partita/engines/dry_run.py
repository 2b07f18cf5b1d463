"""Dry run: the same rounds, plans, version records and messages without training, to predict the bytes sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from partita.core import tensors
from partita.core.client import ClientState, Job, LocalResult, OneExample, begin_round, finish_round
from partita.core.client_rule import overrides
from partita.core.data import EvaluateOn
from partita.core.method_error import MethodError
from partita.core.model import Model
from partita.core.rounds import ClientFailure, initial_server, rounds
from partita.core.server_rule import Server
from partita.core.settings import Run
from partita.core.update import DeltaFacts, Update
from partita.engines.availability import Availability


class DryRunEngine:
    """Engine whose clients immediately return a zero update.

    Raises:
        MethodError: If the method's plan depends on the clients' data.
    """

    def __init__(
        self, run: Run, model: Model, clients: Sequence[str], availability: Availability | None = None
    ) -> None:
        for rule in run.method.client_rules:
            if rule.uses_data and overrides(rule, "narrow"):
                raise MethodError(
                    f"{run.method.name} chooses layers from the clients' data, so a dry run cannot predict it; for "
                    "the same number of bytes, use a choice without data: for safl, set method.select = 'random'"
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

    def evaluate(self, jobs: Iterable[Job], on: EvaluateOn = None) -> Iterator[tuple[str, dict[str, float]]]:
        raise MethodError("a dry run does not train, so there is nothing to evaluate")


def null_update(run: Run, model: Model, job: Job) -> Update:
    """Return the update of a client whose training changed nothing. Names and shapes are those of a real update."""
    client_round = begin_round(run, model, job, ClientState(), OneExample(), trains=False)
    unchanged = tensors.select(client_round.ctx.anchor, client_round.plan.train)
    delta = tensors.zeros_like(tensors.select(unchanged, client_round.plan.up))
    result = LocalResult(unchanged, dict.fromkeys(unchanged, 1), [0.0], {}, DeltaFacts(delta, finite=True))
    return finish_round(run, client_round, result)[0]


def dry_run(
    run: Run, model: Model, clients: Sequence[str], until: int, availability: Availability | None = None
) -> Server:
    """Return the server state before round `until`, including the record of what each client holds.

    Args:
        run: The settings.
        model: The model.
        clients: All clients.
        until: The first round that is not run.
        availability: Simulated dropouts, which change what a client is sent later.
    """
    run = replace(run, drift=False, secure_aggregation=None, client_noise=None)  # sums would be of zeros
    server = initial_server(run, model)
    for result in islice(rounds(run, model, DryRunEngine(run, model, clients, availability), server), until):
        server = result.server
    return server
