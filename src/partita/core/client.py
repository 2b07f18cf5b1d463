"""One client's round: visit -> train -> reply, a pure function of the job, the client's state and its data.

Rules are written for one client. `training` computes what lies between visit and reply, for one client or several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from partita.core import tensors
from partita.core.batch_schedule import Deal, deal, sample
from partita.core.data import Examples
from partita.core.dp_settings import Private
from partita.core.method import Context, Local, Unseen, Update
from partita.core.model import Model
from partita.core.plan import NONE, Phase, Plan, Turn, plan_for
from partita.core.rng import Key
from partita.core.settings import Run
from partita.core.tensors import Names, Slots, Tensors

_OPTIMIZER = "optimizer."  # the prefix of the slots in which a client's memory holds its optimizer's state


class ClientFault(RuntimeError):
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
class Visit:
    job: Job
    state: ClientState
    plan: Plan
    ctx: Context
    examples: Examples
    deals: tuple[Deal, ...]  # for each phase
    key: Key
    told: Mapping[str, float] = field(default_factory=dict)
    private: Private | None = None


@dataclass(frozen=True)
class Learned:
    params: Mapping[str, Tensor]  # of the trained names
    steps: Mapping[str, int]
    losses: Sequence[float]  # the task's before each step
    optimizer: Slots
    delta: Mapping[str, Tensor]  # params - anchor, of what goes up: a block takes it for all clients at once


def turn_of(run: Run, job: Job) -> Turn:
    return Turn(job.round, run.rounds, job.client, job.signal)


def assemble(run: Run, model: Model, job: Job, state: ClientState) -> tuple[Plan, Tensors]:
    """The client's plan and its full parameters: the server's, its own, and for the rest the model's as loaded."""
    plan = plan_for(run.method.plan, model, turn_of(run, job))
    personal = {name: state.personal.get(name, model.initial[name]) for name in plan.keep}
    return plan, {**model.initial, **job.params, **personal}


def shaped(run: Run, model: Model, job: Job) -> Model:
    """The model as this client runs it."""
    shape = run.method.shape
    return shape(model, turn_of(run, job)) if shape else model


def visit(run: Run, model: Model, job: Job, state: ClientState, examples: Examples, work: float = 1.0) -> Visit:
    """Lay out one client's round. `work` below 1 is a straggler, who gets through that share of its steps."""
    plan, anchor = assemble(run, model, job, state)
    key = (run.secret or run.key) / "round" / job.round / "client" / job.client
    fresh = {slot: value for rule in run.method.local for slot, value in rule.memory(anchor).items()}
    memory = {slot: part for slot, part in state.memory.items() if not slot.startswith(_OPTIMIZER)}
    ctx = Context(
        shaped(run, model, job),
        plan,
        anchor,
        job.slots,
        {**fresh, **memory},
        run.rate(job.round),
        turn=turn_of(run, job),
    )
    notes: dict[str, Tensors] = {}
    told: dict[str, float] = {}
    for index, rule in enumerate(run.method.local):
        if type(rule).narrow is not Local.narrow:
            probe = examples if rule.looks or not run.method.privacy else Unseen(rule)
            choice = rule.narrow(plan, probe, ctx, key / "narrow" / index)
            plan = plan.narrow(choice.names)
            notes |= choice.notes
            told |= choice.told
    if plan is not ctx.plan or notes:
        ctx = replace(ctx, plan=plan, notes=notes)
    private = run.method.privacy
    poisson = private is not None and private.sampling == "poisson"
    deals = _lay_out(run, job, plan, examples, key, sample if poisson else deal, work)
    return Visit(job, state, plan, ctx, examples, deals, key, told, private)


def trial(run: Run, model: Model, job: Job, state: ClientState, examples: Examples, phases: tuple[Phase, ...]) -> Visit:
    """A visit whose result is for evaluation only: the client adapts a copy of the whole model, and nothing travels."""
    _, anchor = assemble(run, model, job, state)
    key = run.key / "round" / job.round / "client" / job.client / "adapt"
    plan = Plan(phases, up=NONE, down=NONE, keep=model.every())
    ctx = Context(shaped(run, model, job), plan, anchor, {}, {}, run.rate(job.round))
    return Visit(job, ClientState(), plan, ctx, examples, _lay_out(run, job, plan, examples, key, deal, 1.0), key)


def _lay_out(
    run: Run, job: Job, plan: Plan, examples: Examples, key: Key, dealt: Callable[..., Deal], work: float
) -> tuple[Deal, ...]:
    count = len(examples)
    if not count:
        raise ClientFault(job.client, "has no training examples; give it some or leave it out of the population")
    phases = enumerate(plan.phases)
    return tuple([dealt(count, run.training, phase.epochs, key / "batches" / place, work) for place, phase in phases])


def reply(run: Run, visit: Visit, learned: Learned) -> tuple[Update, ClientState]:
    """What the client sends and what it keeps; whatever a rule returns is gated by the plan."""
    client, plan, ctx = visit.job.client, visit.plan, visit.ctx
    # Under privacy the loss, which no noise was added to, tells the server nothing: neither its value nor a fault.
    losses = learned.losses if visit.private is None else []
    for step, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            raise ClientFault(
                client,
                f"the loss is {loss} at step {step} of {len(losses)} in round {visit.job.round}; "
                "lower training.lr, set training.clip, or look at the client's data",
            )
    slots: dict[str, Tensors] = {}
    memory = {slot: dict(part) for slot, part in visit.state.memory.items()}
    for rule in run.method.local:
        if type(rule).finish is Local.finish:
            continue  # nobody looks at the parameters, so they are not taken apart
        send, remember = rule.finish({**ctx.anchor, **learned.params}, learned.steps, ctx)
        if stray := (send.keys() | remember.keys()) - rule.slots:
            raise ClientFault(
                client, f"{type(rule).__name__} hands back the slot '{sorted(stray)[0]}', not among its own"
            )
        slots |= tensors.within(send, plan.up)
        for slot, part in tensors.within(remember, plan.train).items():
            memory[slot] = {**ctx.memory.get(slot, {}), **part}
    if run.method.carry_optimizer:
        for slot, part in learned.optimizer.items():
            memory[_OPTIMIZER + slot] = {**memory.get(_OPTIMIZER + slot, {}), **part}
    mean = math.fsum(losses) / len(losses) if losses else None
    size = float(len(visit.examples))
    update = Update(client, learned.delta, slots, size, learned.steps, mean, visit.told, visit.job.round)
    for index, transform in enumerate(run.method.channel):
        update = transform.encode(update, visit.key / "channel" / index)
    kept = {name: learned.params[name] if name in learned.params else ctx.anchor[name] for name in sorted(plan.keep)}
    personal = {**visit.state.personal, **kept}
    return update, ClientState(tensors.own(personal), {slot: tensors.own(part) for slot, part in memory.items()})


def _carried(run: Run, each: Visit) -> dict[str, Tensors]:
    if not run.method.carry_optimizer:
        return {}
    memory = each.state.memory
    return {slot.removeprefix(_OPTIMIZER): part for slot, part in memory.items() if slot.startswith(_OPTIMIZER)}
