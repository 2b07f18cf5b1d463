"""The round loop, as a generator.

What happens between rounds (records, evaluation, checkpoints, early stopping) is the consumer's. Listeners see what
happens inside a round.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, Protocol

import torch

from partita.core.client import ClientError, Job
from partita.core.data import EvaluateOn
from partita.core.drift import Drift, DriftMeasures
from partita.core.method_error import MethodError
from partita.core.model import Model
from partita.core.plan import Plan, RoundInfo, plan_for
from partita.core.server_rule import Server
from partita.core.settings import Run, RunError
from partita.core.tensors import Names, Tensors, all_finite, restrict_slots
from partita.core.traffic import Traffic, TrafficMeter
from partita.core.update import Aggregate, ComputedWork, MaskedUpdate, SecureSum, Update
from partita.core.update_checks import CheckedUpdate, InvalidUpdate, UpdateLimits, UpdateValidator, readable, shorten
from partita.core.versions import ParameterVersions


def first_non_finite(before: Server, after: Server) -> str | None:
    """Return the name of a parameter or of server state that the round changed to a non-finite value, or None."""
    moved = _changed(before.params, after.params)
    for slot, part in after.state.items():
        moved |= {f"{slot}/{name}": value for name, value in _changed(before.state.get(slot, {}), part).items()}
    groups: dict[tuple[torch.device, torch.dtype], Tensors] = {}
    for name, value in moved.items():
        if value.is_floating_point() and value.numel():
            groups.setdefault((value.device, value.dtype), {})[name] = value
    for part in groups.values():  # one check per device and dtype: each check synchronizes with the GPU
        if not all_finite(part):
            return next(name for name, value in part.items() if not all_finite({name: value}))
    return None


def _changed(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: value for name, value in after.items() if value is not before.get(name)}


MAX_REASON = 500  # characters of a failure reason; the text may come from a client
UNKNOWN_CLIENT = "unknown"  # recorded as the sender if a reply does not name one


@dataclass(frozen=True)
class ClientFailure:
    """A client of the cohort from which no usable update arrived.

    Attributes:
        client: The client's name.
        reason: Why there is no update.
        empty: Whether the client lost all parameters that it received earlier, so that they must be sent again.
        refused: Whether the client answered and the server rejected the answer.
    """

    client: str
    reason: str
    empty: bool = False
    refused: bool = False


Reply = Update | ClientFailure | MaskedUpdate | SecureSum


class Engine(Protocol):
    """Carries jobs to clients and updates back."""

    def clients(self) -> Sequence[str]:
        """The names of all available clients."""
        ...

    def train(self, jobs: Iterable[Job]) -> Iterator[Reply]:
        """Train each job and yield one reply for it, in the order of the jobs.

        Both sides are streams: jobs are created as the engine draws them, and the server consumes each reply before it
        asks for the next. If the run has `secure_aggregation`, the reply of a client is a ClientFailure or a
        MaskedUpdate, and one SecureSum follows the replies of all clients.
        """
        ...

    def evaluate(self, jobs: Iterable[Job], on: EvaluateOn = None) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield `(client, scores)` on each client's own test examples, or on `on`. Clients without scores are skipped.

        Args:
            jobs: One job for each client to evaluate.
            on: "validation" for each client's own validation examples, or examples to evaluate all clients on.
        """
        ...


@dataclass(frozen=True)
class RoundResult:
    """The outcome of one round.

    Attributes:
        number: The round, from 0.
        server: The server after the round.
        cohort: The clients that were asked.
        lost: The clients of the cohort without a usable update.
        traffic: Bytes up and down.
        loss: The mean training loss, weighted by the clients' numbers of examples; None if no client reported one.
        drift: Drift measures by tag; empty if `Run.drift` is off.
        sent: By client, the names of its delta.
        metrics: By client, the metrics of its rules.
        refused: Unexpected replies: a second reply, one from a client that was not asked, or one for another round.
        norms: By client, the norm of its delta as sent; empty under client-level privacy.
        bounded: The clients whose update was longer than `federation.max_norm` and was scaled down.
        skipped: Why the round did not change the server; None if it did.
        population: The number of available clients from which the cohort was drawn.
        losses: By client, the training loss that it reported; empty with secure aggregation.
        secure: What the row says about secure aggregation; None without it.
        padding: The share of padding in what the clients' training computed; None if it is not known.
    """

    number: int
    server: Server
    cohort: tuple[str, ...]
    lost: tuple[ClientFailure, ...]
    traffic: Traffic
    loss: float | None
    drift: DriftMeasures
    sent: Mapping[str, Names]
    metrics: Mapping[str, Mapping[str, float]]
    refused: tuple[ClientFailure, ...] = ()
    norms: Mapping[str, float] = field(default_factory=dict)
    bounded: Names = frozenset()
    skipped: str | None = None
    population: int = 0
    losses: Mapping[str, float] = field(default_factory=dict)
    secure: Mapping[str, Any] | None = None
    padding: float | None = None


class Listener:
    """Sees what happens in a round, and changes nothing. An error that it raises ends the run."""

    def waits(self) -> None:
        """The round needs clients. With a real engine, they may still have to connect."""

    def begins(self, number: int, clients: int, cohort: int) -> None:
        """Round `number` begins: of `clients` available clients, `cohort` will be asked."""

    def asks(self, job: Job) -> None:
        """A job is about to leave the server."""

    def receives(self, reply: Reply) -> None:
        """A reply has arrived. It has not been checked yet."""

    def ends(self, result: RoundResult) -> None:
        """The round is over."""


def initial_server(run: Run, model: Model) -> Server:
    """Return the server before the first round."""
    return Server(
        dict(model.initial),
        run.method.server_rule.init(model),
        ParameterVersions(
            dict.fromkeys(sorted(model.initial), 0),
            clients_have_initial_model=run.federation.clients_have_initial_model,
        ),
    )


def rounds(
    run: Run,
    model: Model,
    engine: Engine,
    server: Server | None = None,
    start: int = 0,
    losses: Mapping[str, float] | None = None,
    listeners: Sequence[Listener] = (),
) -> Iterator[RoundResult]:
    """Run rounds `start` to `run.rounds - 1` and yield the result of each.

    Args:
        run: The settings.
        model: The model.
        engine: Trains the clients.
        server: The server after round `start - 1`, to resume a run; None for the initial server.
        start: The first round to run.
        losses: By client, the training loss that it reported last before `start`, for sampling rules that use it.
        listeners: Told what happens in each round.

    Yields:
        One RoundResult per round. The next round starts when the consumer asks for it.
    """
    server = server or initial_server(run, model)
    limits = UpdateLimits(run, model)
    known = dict(losses or {})
    for number in range(start, run.rounds):
        result = _RoundRunner(limits, server, number, known, listeners).run_round(engine)
        server = result.server
        known |= result.losses
        for listener in listeners:
            listener.ends(result)
        yield result


def make_job(run: Run, model: Model, server: Server, number: int, client: str) -> tuple[Job, Plan]:
    """Return one client's job and plan.

    The job holds all parameters in `plan.down`. Only those that the client lacks (`Job.stale`) travel.

    Args:
        run: The settings.
        model: The model.
        server: The server before the round.
        number: The round, from 0.
        client: The client's name.

    Raises:
        MethodError: If `ServerRule.send` does not return exactly the names in `plan.down`.
    """
    return _make_job(run, model, server, number, client)[:2]


def _make_job(run: Run, model: Model, server: Server, number: int, client: str) -> tuple[Job, Plan, Names]:
    """Like `make_job`, plus the names whose tensors are not the server's own objects."""
    rule = run.method.server_rule
    signal = rule.signal(server)
    plan = plan_for(run.method.plan, model, RoundInfo(number, run.rounds, client, signal))
    params, slots = rule.send(server, client, plan.down)
    if wrong := params.keys() ^ plan.down:
        raise MethodError(
            f"{run.method.name}: {type(rule).__name__}.send {'adds' if min(wrong) in params else 'leaves out'} "
            f"'{min(wrong)}' for client '{client}'; it must return exactly the names that it is given"
        )
    servers = map(server.params.__getitem__, params)
    own = frozenset(compress(params, map(operator.is_not, params.values(), servers)))
    stale = server.versions.missing(client, plan.down) | own
    return Job(number, client, params, stale, restrict_slots(slots, plan.train), signal), plan, own


class _RoundRunner:
    """Runs one round and collects its records while updates stream through."""

    def __init__(
        self,
        limits: UpdateLimits,
        server: Server,
        number: int,
        known_losses: Mapping[str, float],
        listeners: Sequence[Listener],
    ) -> None:
        self.run, self.model, self.server, self.number = limits.run, limits.model, server, number
        self.known_losses, self.listeners = known_losses, listeners
        self.validator = UpdateValidator(limits, server, number, self._job)
        self.drift = Drift(self.model)
        self.traffic = TrafficMeter()
        self.cohort: Sequence[str] = ()
        self.population = 0
        self.plans: dict[str, Plan] = {}
        self.overwritten: list[tuple[str, Names]] = []
        self.received: list[tuple[str, Names]] = []
        self.lost: list[ClientFailure] = []
        self.refused: list[ClientFailure] = []
        self.losses: dict[str, tuple[float, float]] = {}  # client -> (weight, loss)
        self.sent: dict[str, Names] = {}
        self.metrics: dict[str, Mapping[str, float]] = {}
        self.norms: dict[str, float] = {}
        self.bounded: set[str] = set()
        self.secure: SecureSum | None = None
        self.work: list[ComputedWork] = []

    def run_round(self, engine: Engine) -> RoundResult:
        for listener in self.listeners:
            listener.waits()
        method, clients = self.run.method, engine.clients()
        key = (self.run.secret or self.run.key) / "round" / self.number
        self.cohort = cohort = self.run.draw_cohort(self.number, clients, self.known_losses)
        self.population = len(clients)
        if (needed := self.run.federation.min_updates) > len(cohort):
            raise RunError(f"federation.min_updates is {needed}, but only {len(cohort)} clients are asked per round")
        for listener in self.listeners:
            listener.begins(self.number, len(clients), len(cohort))
        replies = self._heard(engine.train(self._ask(client) for client in cohort))
        if self.run.secure_aggregation:
            aggregate = self._receive_sum(replies)
        else:
            aggregate = method.server_rule.reduce(self.server, self._receive(replies), len(clients))
        if aggregate and aggregate.cohort != len(self.received):
            raise MethodError(
                f"{method.name}: {type(method.server_rule).__name__} reports {aggregate.cohort} reduced updates, but "
                f"there were {len(self.received)}; it must consume each update once and count them"
            )
        few = self._too_few()
        if aggregate is None or few:
            return self._result(self.server, few)
        for index, transform in reversed(list(enumerate(method.transforms))):
            aggregate = transform.decode_aggregate(aggregate, key / "channel" / index)
        server = method.server_rule.apply(self.server, aggregate)
        if bad_name := first_non_finite(self.server, server):
            reason = f"round {self.number} would have made the server's '{bad_name}' not finite"
            if not self.run.federation.skip_failed_clients:
                raise RunError(f"{reason}; lower training.lr, or method.lr where there is one")
            return self._result(self.server, reason)
        return self._result(server)

    def _too_few(self) -> str | None:
        """Return why too few updates arrived, or None if there are enough.

        Missing clients are an error. Rejected updates may be an attack, and with `skip_failed_clients` an attacker must
        not be able to end the run.
        """
        count, refused = len(self.received), sum(lost.refused for lost in self.lost)
        needed, failure = self.run.federation.min_updates, self.secure.failure if self.secure else None
        if count >= needed and not failure:
            return None
        reasons = "; ".join(f"{lost.client}: {lost.reason}" for lost in self.lost[:3])
        short, remedy = f"only {count} of {len(self.cohort)} clients answered in round {self.number}", ""
        if self.secure and failure:
            needed = max(needed, self.secure.needed)
            short = f"round {self.number} cannot be unmasked: {failure} ({reasons or 'no client was lost'})"
        else:
            short += f" and federation.min_updates is {needed} ({reasons})"
            remedy = "; lower it, or ask more clients per round"
        if not self.run.federation.skip_failed_clients or count + refused < needed:
            raise RunError(f"{short}{remedy}")
        return short

    def _result(self, server: Server, skipped: str | None = None) -> RoundResult:
        moved = frozenset(name for name, value in server.params.items() if value is not self.server.params[name])
        versions = (
            self.server.versions.acknowledge(self.received).forget(self.overwritten).changed(moved, self.number + 1)
        )
        weight = sum(weight for weight, _ in self.losses.values())
        loss = sum(weight * loss for weight, loss in self.losses.values()) / weight if weight else None
        computed = sum(work.computed for work in self.work)
        return RoundResult(
            self.number,
            replace(server, versions=versions),
            tuple(self.cohort),
            tuple(self.lost),
            self.traffic.total(),
            self.secure.loss if self.secure else loss,
            self.drift.measures(),
            self.sent,
            self.metrics,
            tuple(self.refused),
            self.norms,
            frozenset(self.bounded),
            skipped,
            self.population,
            {client: loss for client, (_, loss) in self.losses.items()},
            self.secure.facts if self.secure else None,
            1 - sum(work.real for work in self.work) / computed if computed else None,
        )

    def _job(self, client: str) -> Job:
        return make_job(self.run, self.model, self.server, self.number, client)[0]

    def _ask(self, client: str) -> Job:
        job, self.plans[client], own = _make_job(self.run, self.model, self.server, self.number, client)
        if own:
            self.overwritten.append((client, own))
        self.traffic.add_job(job, common=not own and not job.slots)
        for listener in self.listeners:
            listener.asks(job)
        return job

    def _heard(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        for reply in replies:
            for listener in self.listeners:
                listener.receives(reply)
            yield reply

    def _receive_sum(self, replies: Iterable[Reply]) -> Aggregate | None:
        """Return the mean of the round's masked updates, or None if it cannot be unmasked."""
        for reply in replies:
            if isinstance(reply, SecureSum) and self.secure is None:
                self.secure = reply
                self.traffic.add_secure(reply.up, reply.down)
            elif not isinstance(reply, MaskedUpdate | ClientFailure) or reply.client not in self.plans:
                raise RunError(
                    f"the engine returns a {type(reply).__name__} in a run with secure aggregation; use an engine that "
                    "masks updates"
                )
            elif isinstance(reply, ClientFailure):
                del self.plans[reply.client]
                self._record_failure(reply)
            else:
                plan = self.plans.pop(reply.client)
                self.received.append((reply.client, plan.down))
                self.sent[reply.client] = plan.up
        if self.secure is None or self.plans:
            raise RunError("the engine did not answer for all clients, or returned no sum; this is a bug of the engine")
        return self.secure.aggregate

    def _receive(self, replies: Iterable[Reply]) -> Iterator[Update]:
        for reply in replies:
            if isinstance(reply, MaskedUpdate | SecureSum):
                raise RunError("the engine masks updates, but the run has no [secure_aggregation]")
            if fault := self._unexpected(reply):
                self._drop(reply, fault)
                continue
            plan = self.plans.pop(reply.client)
            if isinstance(reply, ClientFailure):
                self._record_failure(reply)
                continue
            try:
                update = readable(reply)
                self.traffic.add_update(update)
                checked = self.validator.check(update, plan)
            except InvalidUpdate as refusal:
                if not self.run.federation.skip_failed_clients:
                    raise ClientError(reply.client, str(refusal)) from refusal
                self._record_failure(ClientFailure(reply.client, str(refusal), refused=True))
                continue
            self._record_update(checked, plan)
            update = replace(checked.update, weight=1.0) if self.run.sampling.equal_weights else checked.update
            if self.run.drift:
                self.drift.add(update)
            yield update
        dropped = {lost.client: lost.reason for lost in self.refused}
        for client in self.plans:
            # A dropped reply may have been this client's, sent under another name or without one.
            self._record_failure(ClientFailure(client, dropped.get(client, "gave no answer"), refused=bool(dropped)))

    def _unexpected(self, reply: object) -> str | None:
        """Return why this is not the expected reply of an asked client, or None if it is."""
        if not isinstance(reply, Update | ClientFailure) or not isinstance(reply.client, str):
            return f"sent a {type(reply).__name__} instead of an update with a client name"
        if reply.client not in self.plans:
            return f"answered in round {self.number} without being asked, or twice"
        if (
            isinstance(reply, ClientFailure)
            or reply.round is None
            or (type(reply.round) is int and reply.round == self.number)
        ):
            return None
        return f"answered for round {shorten(reply.round)} in round {self.number}"

    def _drop(self, reply: object, fault: str) -> None:
        named = isinstance(reply, Update | ClientFailure) and isinstance(reply.client, str)
        # Guess the sender from the order of replies, for the error message only: a wrong guess must not make another
        # client lose its turn.
        client = reply.client if named else next(iter(self.plans), UNKNOWN_CLIENT)  # type: ignore[attr-defined]
        if not self.run.federation.skip_failed_clients:
            raise ClientError(client, fault)
        self.refused.append(ClientFailure(client[:MAX_REASON] if named else UNKNOWN_CLIENT, fault, refused=True))

    def _record_failure(self, lost: ClientFailure) -> None:
        self.lost.append(replace(lost, reason=str(lost.reason)[:MAX_REASON]))
        if lost.empty:
            self.overwritten.append((lost.client, self.model.all_names()))

    def _record_update(self, checked: CheckedUpdate, plan: Plan) -> None:
        update = checked.update
        self.received.append((update.client, plan.down))
        self.sent[update.client] = frozenset(update.delta)
        if update.metrics:
            self.metrics[update.client] = update.metrics
        if update.loss is not None:
            self.losses[update.client] = update.weight, update.loss
        if update.work is not None:
            self.work.append(update.work)
        if checked.norm is not None:
            self.norms[update.client] = checked.norm
        if checked.bounded:
            self.bounded.add(update.client)
