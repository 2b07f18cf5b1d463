"""One client's round: visit -> train -> reply, a pure function of the job, the client's state and its data.

Rules are written for one client. `training` computes what lies between visit and reply, for one client or several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from partita.core import tensors
from partita.core.batch_schedule import BatchSchedule, poisson_batches, shuffled_batches
from partita.core.data import Examples
from partita.core.dp_settings import DPSGDSettings
from partita.core.method import ClientRule, Context, ForbiddenData, Update
from partita.core.model import Model
from partita.core.plan import NO_NAMES, Phase, Plan, RoundInfo, plan_for
from partita.core.rng import Key
from partita.core.settings import Run
from partita.core.tensors import Names, Slots, Tensors

OPTIMIZER_PREFIX = "optimizer."  # the prefix of the slots in which a client's memory holds its optimizer's state


class ClientError(RuntimeError):
    """Something went wrong at one client."""

    def __init__(self, client: str, reason: str) -> None:
        super().__init__(f"client '{client}': {reason}")
        self.client, self.reason = client, reason


@dataclass(frozen=True)
class Job:
    """What the server asks of a client. Of params only the stale names travel: the client holds the others."""

    round: int
    client: str
    params: Tensors
    stale: Names
    slots: Slots = field(default_factory=dict)
    signal: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientState:
    """What stays with the client: its personal parameters, and the memory of its rules and optimizer."""

    personal: Tensors = field(default_factory=dict)
    memory: Slots = field(default_factory=dict)


@dataclass(frozen=True)
class ClientRound:
    job: Job
    state: ClientState
    plan: Plan
    ctx: Context
    examples: Examples
    schedules: tuple[BatchSchedule, ...]  # for each phase
    key: Key
    metrics: Mapping[str, float] = field(default_factory=dict)
    private: DPSGDSettings | None = None


@dataclass(frozen=True)
class LocalResult:
    params: Mapping[str, Tensor]  # of the trained names
    steps: Mapping[str, int]
    losses: Sequence[float]  # the task's before each step
    optimizer: Slots
    delta: Mapping[str, Tensor]  # params - anchor, of what goes up: a block takes it for all clients at once


def round_info_of(run: Run, job: Job) -> RoundInfo:
    return RoundInfo(job.round, run.rounds, job.client, job.signal)


def client_params(run: Run, model: Model, job: Job, state: ClientState) -> tuple[Plan, Tensors]:
    """The client's plan and its full parameters: the server's, its own, and for the rest the model's as loaded."""
    plan = plan_for(run.method.plan, model, round_info_of(run, job))
    personal = {name: state.personal.get(name, model.initial[name]) for name in plan.keep}
    return plan, {**model.initial, **job.params, **personal}


def client_model(run: Run, model: Model, job: Job) -> Model:
    """The model as this client runs it."""
    shape = run.method.shape
    return shape(model, round_info_of(run, job)) if shape else model


def begin_round(
    run: Run, model: Model, job: Job, state: ClientState, examples: Examples, fraction: float = 1.0
) -> ClientRound:
    """Lay out one client's round. `work` below 1 is a straggler, who gets through that share of its steps."""
    plan, anchor = client_params(run, model, job, state)
    key = (run.secret or run.key) / "round" / job.round / "client" / job.client
    fresh = {slot: value for rule in run.method.client_rules for slot, value in rule.memory(anchor).items()}
    memory = {slot: part for slot, part in state.memory.items() if not slot.startswith(OPTIMIZER_PREFIX)}
    ctx = Context(
        client_model(run, model, job),
        plan,
        anchor,
        job.slots,
        {**fresh, **memory},
        run.rate(job.round),
        notes={},
        round_info=round_info_of(run, job),
    )
    notes: dict[str, Tensors] = {}
    metrics: dict[str, float] = {}
    for index, rule in enumerate(run.method.client_rules):
        if type(rule).narrow is not ClientRule.narrow:
            probe = examples if rule.uses_data or not run.method.privacy else ForbiddenData(rule)
            choice = rule.narrow(plan, probe, ctx, key / "narrow" / index)
            plan = plan.narrow(choice.names)
            notes |= choice.notes
            metrics |= choice.metrics
    if plan is not ctx.plan or notes:
        ctx = replace(ctx, plan=plan, notes=notes)
    private = run.method.privacy
    poisson = private is not None and private.sampling == "poisson"
    schedules = _batch_schedules(
        run, job, plan, examples, key, poisson_batches if poisson else shuffled_batches, fraction
    )
    return ClientRound(job, state, plan, ctx, examples, schedules, key, metrics, private)


def adaptation_round(
    run: Run, model: Model, job: Job, state: ClientState, examples: Examples, phases: tuple[Phase, ...]
) -> ClientRound:
    """A visit whose result is for evaluation only: the client adapts a copy of the whole model, and nothing travels."""
    _, anchor = client_params(run, model, job, state)
    key = run.key / "round" / job.round / "client" / job.client / "adapt"
    plan = Plan(phases, up=NO_NAMES, down=NO_NAMES, keep=model.all_names())
    ctx = Context(client_model(run, model, job), plan, anchor, {}, {}, run.rate(job.round))
    return ClientRound(
        job,
        ClientState(),
        plan,
        ctx,
        examples,
        _batch_schedules(run, job, plan, examples, key, shuffled_batches, 1.0),
        key,
    )


def _batch_schedules(
    run: Run,
    job: Job,
    plan: Plan,
    examples: Examples,
    key: Key,
    make_schedule: Callable[..., BatchSchedule],
    fraction: float,
) -> tuple[BatchSchedule, ...]:
    count = len(examples)
    if not count:
        raise ClientError(job.client, "has no training examples; give it some or leave it out of the population")
    phases = enumerate(plan.phases)
    return tuple(
        [make_schedule(count, run.training, phase.epochs, key / "batches" / place, fraction) for place, phase in phases]
    )


def finish_round(run: Run, client_round: ClientRound, learned: LocalResult) -> tuple[Update, ClientState]:
    """What the client sends and what it keeps; whatever a rule returns is gated by the plan."""
    client, plan, ctx = client_round.job.client, client_round.plan, client_round.ctx
    # Under privacy the loss, which no noise was added to, tells the server nothing: neither its value nor a fault.
    losses = learned.losses if client_round.private is None else []
    for step, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            raise ClientError(
                client,
                f"the loss is {loss} at step {step} of {len(losses)} in round {client_round.job.round}; "
                "lower training.lr, set training.clip, or look at the client's data",
            )
    slots: dict[str, Tensors] = {}
    memory = {slot: dict(part) for slot, part in client_round.state.memory.items()}
    for rule in run.method.client_rules:
        if type(rule).finish is ClientRule.finish:
            continue  # nobody looks at the parameters, so they are not taken apart
        send, remember = rule.finish({**ctx.anchor, **learned.params}, learned.steps, ctx)
        if stray := (send.keys() | remember.keys()) - rule.slots:
            raise ClientError(
                client, f"{type(rule).__name__} hands back the slot '{sorted(stray)[0]}', not among its own"
            )
        slots |= tensors.restrict_slots(send, plan.up)
        for slot, part in tensors.restrict_slots(remember, plan.train).items():
            memory[slot] = {**ctx.memory.get(slot, {}), **part}
    if run.method.carry_optimizer:
        for slot, part in learned.optimizer.items():
            memory[OPTIMIZER_PREFIX + slot] = {**memory.get(OPTIMIZER_PREFIX + slot, {}), **part}
    mean = math.fsum(losses) / len(losses) if losses else None
    size = float(len(client_round.examples))
    update = Update(
        client, learned.delta, slots, size, learned.steps, mean, client_round.metrics, client_round.job.round
    )
    for index, transform in enumerate(run.method.transforms):
        update = transform.encode(update, client_round.key / "channel" / index)
    kept = {name: learned.params[name] if name in learned.params else ctx.anchor[name] for name in sorted(plan.keep)}
    personal = {**client_round.state.personal, **kept}
    return update, ClientState(
        tensors.clone_views(personal), {slot: tensors.clone_views(part) for slot, part in memory.items()}
    )


def carried_optimizer_state(run: Run, each: ClientRound) -> dict[str, Tensors]:
    if not run.method.carry_optimizer:
        return {}
    memory = each.state.memory
    return {
        slot.removeprefix(OPTIMIZER_PREFIX): part for slot, part in memory.items() if slot.startswith(OPTIMIZER_PREFIX)
    }
