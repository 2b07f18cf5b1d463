"""What an experiment's plan sends up in the whole run, so that a policy can allow that and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from glob import escape

from partita.core.client import Job
from partita.core.client_rule import overrides
from partita.core.model import Model, role_tag
from partita.core.plan import RoundInfo, plan_for
from partita.core.rounds import rounds
from partita.core.sampling import Uniform
from partita.core.settings import Run
from partita.core.update import Update
from partita.engines.dry_run import DryRunEngine, null_update
from partita.engines.secure_setup import bytes_up


@dataclass
class Needs:
    """What one client sends in the run, if it is asked in every round.

    Attributes:
        names: Parameters that leave in some round.
        kept: Parameters that the client keeps in some round.
        bytes_per_round: The largest update.
        bytes_total: All updates together.
    """

    names: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    bytes_per_round: int = 0
    bytes_total: int = 0


class _Recorder(DryRunEngine):
    """A dry run that notes what each client sends."""

    def __init__(self, run: Run, model: Model, clients: Sequence[str]) -> None:
        # The dry run needs single updates, whether they are then masked or not.
        super().__init__(replace(run, secure_aggregation=None, client_noise=None), model, clients)
        self.sent_run = run
        self.needs = {client: Needs() for client in clients}

    def train(self, jobs: Iterable[Job]) -> Iterator[Update]:
        for job in jobs:
            needs = self.needs[job.client]
            needs.kept |= plan_for(
                self.run.method.plan, self.model, RoundInfo(job.round, self.run.rounds, job.client, job.signal)
            ).keep
            update = null_update(self.run, self.model, job)
            slots = {"delta": update.delta, **update.slots}
            size = bytes_up(self.sent_run, self.model, job, self.names)
            needs.names.update(name for part in slots.values() for name in part)
            needs.bytes_per_round = max(needs.bytes_per_round, size)
            needs.bytes_total += size
            yield update


def needs_of(run: Run, model: Model, clients: Sequence[str]) -> dict[str, Needs]:
    """Return what each client sends, by a dry run of all rounds in which every client is asked.

    A client that chooses from its data what it sends is taken to send all that it may choose from.
    """
    free = tuple(rule for rule in run.method.client_rules if not (rule.uses_data and overrides(rule, "narrow")))
    run = replace(
        run,
        method=replace(run.method, client_rules=free),
        sampling=Uniform(),
        federation=replace(run.federation, cohort=1.0, min_updates=0),
        drift=False,
        examples=None,  # each client of a dry run has one
    )
    engine = _Recorder(run, model, clients)
    deque(rounds(engine.run, model, engine), maxlen=0)
    return engine.needs


def by_role(model: Model, names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return roles that allow parameters of `names` only, and patterns for the names that these leave out.

    A policy allows a parameter if any of its tags is listed. So a role counts only if all parameters with that tag are
    in `names`.
    """
    wanted = set(names)
    roles = {role_tag(model.tags[name]) for name in wanted} - {""}
    tagged = {role: {name for name in model.initial if role in model.tags[name]} for role in roles}
    whole = sorted(role for role, members in tagged.items() if members <= wanted)
    covered = {name for role in whole for name in tagged[role]}
    return whole, [escape(name) for name in sorted(wanted - covered)]
