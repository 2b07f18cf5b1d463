"""The round loop: a generator. Recording, evaluating, checkpointing and stopping are ordinary code that consumes it."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Protocol

from torch import Tensor

from partita.core import wire
from partita.core.drift import Drift, Measures
from partita.core.learn import ClientFault, Job
from partita.core.ledger import Ledger
from partita.core.method import MethodError, Server, Update
from partita.core.model import Examples, Model
from partita.core.plan import Plan, Turn, plan_for
from partita.core.rows import Form, Laid, shapes
from partita.core.run import Run, RunError
from partita.core.tree import Names, finite, select, within


@dataclass(frozen=True)
class Lost:
    """A client that was asked and gave no usable answer."""

    client: str
    reason: str
    empty: bool = False  # it holds nothing of what it was sent any more


class Engine(Protocol):
    """Carries jobs to clients and updates back, in the order asked, one at a time as they are drawn."""

    def clients(self) -> Sequence[str]: ...

    def train(self, jobs: Iterable[Job]) -> Iterator[Update | Lost]: ...

    def evaluate(self, jobs: Iterable[Job], on: Examples | None = None) -> Iterator[tuple[str, dict[str, float]]]:
        """Scores on each client's own test part, or on the examples given; a client without scores is left out."""
        ...


@dataclass
class Traffic:
    """Bytes of a round by parameter name, summed over clients."""

    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Round:
    """What one round did, and the server after it."""

    number: int
    server: Server
    cohort: tuple[str, ...]
    lost: tuple[Lost, ...]
    traffic: Traffic
    loss: float | None
    drift: Measures
    sent: Mapping[str, Names]  # by client, what came up
    told: Mapping[str, Mapping[str, float]]  # by client, the numbers its rules told


def begin(run: Run, model: Model) -> Server:
    """The server before the first round."""
    return Server(
        dict(model.initial),
        run.method.server.init(model),
        Ledger(dict.fromkeys(sorted(model.initial), 0), preloaded=run.preloaded),
    )


def rounds(run: Run, model: Model, engine: Engine, server: Server | None = None, start: int = 0) -> Iterator[Round]:
    """Rounds `start` to the last. To go on after a stop, give the server after the last finished round."""
    server = server or begin(run, model)
    for number in range(start, run.rounds):
        result = _Round(run, model, server, number).play(engine)
        server = result.server
        yield result


def ask(run: Run, model: Model, server: Server, number: int, client: str) -> tuple[Job, Plan]:
    """The job for one client: all that its plan brings down, of which only what the client lacks will travel."""
    return _ask(run, model, server, number, client)[:2]


def _ask(run: Run, model: Model, server: Server, number: int, client: str) -> tuple[Job, Plan, Names]:
    """Also which of the parameters are not the server's own."""
    rule = run.method.server
    signal = rule.signal(server)
    plan = plan_for(run.method.plan, model, Turn(number, run.rounds, client, signal))
    params, slots = rule.send(server, client, plan.down)
    servers = map(server.params.__getitem__, params)
    own = frozenset(compress(params, map(operator.is_not, params.values(), servers)))
    stale = server.ledger.lacks(client, plan.down) | own
    return Job(number, client, params, stale, within(slots, plan.train), signal), plan, own


class _Round:
    """The tallies of one round, filled while updates stream past."""

    def __init__(self, run: Run, model: Model, server: Server, number: int) -> None:
        self.run, self.model, self.server, self.number = run, model, server, number
        self.shapes = {name: value.shape for name, value in server.params.items()}
        self.up: list[Mapping[str, int]] = []  # what each message weighs
        self.down: list[Mapping[str, int]] = []
        self.plain: dict[Names, Mapping[str, int]] = {}  # by names, what the server's own parameters weigh alone
        self.plans: dict[str, Plan] = {}
        self.overwritten: list[tuple[str, Names]] = []
        self.received: list[tuple[str, Names]] = []
        self.fits: dict[tuple[Form, Names], Mapping[str, int]] = {}  # with the steps
        self.lost: list[Lost] = []
        self.losses: list[tuple[float, float]] = []
        self.sent: dict[str, Names] = {}
        self.told: dict[str, Mapping[str, float]] = {}

    def play(self, engine: Engine) -> Round:
        method, clients = self.run.method, engine.clients()
        key = self.run.key / "round" / self.number
        cohort = self.run.draw_cohort(self.number, clients)
        if self.run.minimum > len(cohort):
            raise RunError(
                f"federation.minimum is {self.run.minimum}, but only {len(cohort)} clients are asked a round"
            )
        drift = Drift(self.model)
        updates = self._receive(engine.train(self._ask(client) for client in cohort))
        watched = drift.watch(updates) if self.run.drift else updates
        aggregate = method.server.reduce(self.server, watched, len(clients))
        if aggregate.cohort != len(self.received):
            raise MethodError(
                f"{method.name}: {type(method.server).__name__} says it reduced {aggregate.cohort} updates, but there "
                f"were {len(self.received)}; it must take each once and count them"
            )
        if len(self.received) < self.run.minimum:
            reasons = "; ".join(f"{lost.client}: {lost.reason}" for lost in self.lost[:3])
            raise RunError(
                f"only {len(self.received)} of {len(cohort)} clients answered in round {self.number} and "
                f"federation.minimum is {self.run.minimum} ({reasons}); lower it, or ask more clients a round",
            )
        for index, transform in reversed(list(enumerate(method.channel))):
            aggregate = transform.decode(aggregate, key / "channel" / index)
        server = method.server.apply(self.server, aggregate)
        moved = frozenset(name for name, value in server.params.items() if value is not self.server.params[name])
        ledger = self.server.ledger.acknowledge(self.received).forget(self.overwritten).changed(moved, self.number + 1)
        weight = sum(weight for weight, _ in self.losses)
        return Round(
            self.number,
            replace(server, ledger=ledger),
            tuple(cohort),
            tuple(self.lost),
            Traffic(wire.total(self.up), wire.total(self.down)),
            sum(weight * loss for weight, loss in self.losses) / weight if weight else None,
            drift.measures(),
            self.sent,
            self.told,
        )

    def _ask(self, client: str) -> Job:
        job, self.plans[client], own = _ask(self.run, self.model, self.server, self.number, client)
        if own:
            self.overwritten.append((client, own))
        self.down.append(self._weigh(job, bool(own or job.slots)))
        return job

    def _weigh(self, job: Job, special: bool) -> Mapping[str, int]:
        """What is not special to a client weighs the same for all who lack the same."""
        if not special and job.stale in self.plain:
            return self.plain[job.stale]
        weight = wire.count({"params": select(job.params, job.stale), **job.slots})
        if not special:
            self.plain[job.stale] = weight
        return weight

    def _receive(self, replies: Iterable[Update | Lost]) -> Iterator[Update]:
        for reply in replies:
            if reply.client not in self.plans:
                raise ClientFault(reply.client, f"answered in round {self.number} without being asked, or twice")
            plan = self.plans.pop(reply.client)
            if isinstance(reply, Lost):
                self.lost.append(reply)
                if reply.empty:
                    self.overwritten.append((reply.client, self.model.every()))
                continue
            self.up.append(wire.count({"delta": reply.delta, **reply.slots}))
            reply, fault = self._open(reply)
            if fault := fault or self._fault(reply, plan):
                if not self.run.tolerate:
                    raise ClientFault(reply.client, fault)
                self.lost.append(Lost(reply.client, fault))
                continue
            self.received.append((reply.client, plan.down))
            self.sent[reply.client] = frozenset(reply.delta)
            if reply.told:
                self.told[reply.client] = reply.told
            if reply.loss is not None:
                self.losses.append((reply.weight, reply.loss))
            yield reply

    def _open(self, update: Update) -> tuple[Update, str | None]:
        """What came over the wire as it was before; with the fault where that cannot be."""
        try:
            for transform in reversed(self.run.method.channel):
                update = transform.open(update)
        except (ValueError, RuntimeError) as error:  # torch's own complaint of a shape or type is a RuntimeError
            return update, f"sent what cannot be opened: {error}"
        return update, None

    def _fault(self, update: Update, plan: Plan) -> str | None:
        """Fewer names than the plan sends up are fine, others are not; nor are odd shapes or numbers."""
        if not 0 <= update.weight < math.inf:
            return f"sent the weight {update.weight}; it must be a number from 0 up"
        if update.loss is not None and not math.isfinite(update.loss):
            return f"sent the loss {update.loss}; lower training.lr, set training.clip, or look at the client's data"
        for what, number in update.told.items():
            if not math.isfinite(number):
                return f"told {number} for '{what}'; it must be a finite number"
        for part in (update.delta, *update.slots.values()):
            if fault := self._misfit(part, plan.up, update.steps):
                return fault
            if not finite(part):
                wrong = next(name for name, value in part.items() if not finite({name: value}))
                return f"sent '{wrong}' with values that are not finite; lower training.lr or set training.clip"
        return None

    def _misfit(self, part: Mapping[str, Tensor], up: Names, taken: Mapping[str, int]) -> str | None:
        if isinstance(part, Laid) and self.fits.get((part.form, up)) is taken:
            return None  # as that of a client before
        for name, shape in zip(part, shapes(part), strict=True):
            if name not in up:
                return f"sent '{name}', which its plan does not send up in round {self.number}"
            if shape != self.shapes[name]:
                return f"sent '{name}' of shape {tuple(shape)}, not {tuple(self.shapes[name])}"
            steps = taken.get(name)
            if not isinstance(steps, int) or steps < 1:
                return f"sent '{name}' after {steps} steps; it must be a whole number from 1 up"
        if isinstance(part, Laid):
            self.fits[part.form, up] = taken
        return None
