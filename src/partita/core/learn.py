"""One client's round: visit -> learn -> reply, a pure function of the job, the client's state and its data.

Rules are written for one client. `learn` takes one visit and calls them plainly, or several and lifts them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import cycle, islice

import torch
from torch import Tensor

from partita.core import memory, tree
from partita.core.block import Block
from partita.core.method import Context, Local, Unseen, Update
from partita.core.model import Examples, Model
from partita.core.plan import NONE, Phase, Plan, Turn, plan_for
from partita.core.private import Draw, Private
from partita.core.rng import Key
from partita.core.rows import Known, Laid, known
from partita.core.run import Run, Training
from partita.core.stage import Deal, stage
from partita.core.tree import Names, Slots, Tensors

LARGE = 10**8  # examples in a client's round, from which their order is a matter of memory
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


def count_steps(count: int, training: Training, epochs: int | None, work: float = 1.0) -> int:
    """A client's steps in one phase."""
    per_epoch = -(-count // training.batch_size)
    total = training.steps if training.steps is not None and epochs is None else (epochs or training.epochs) * per_epoch
    steps = max(1, int(total * work))
    if (numbers := steps * min(count, training.batch_size)) > LARGE:  # asking what is free takes longer than most calls
        memory.require(16 * numbers, f"the order of examples in {steps:,} steps", "train fewer epochs or steps a round")
    return steps


def deal(count: int, training: Training, epochs: int | None, key: Key, work: float = 1.0) -> Deal:
    """Every epoch is a new permutation, and its last batch may be short."""
    sizes = _sizes(count, training.batch_size, count_steps(count, training, epochs, work))
    orders = [(key / epoch).permutation(count) for epoch in range(-(-sum(sizes) // count))]
    return Deal((orders[0] if len(orders) == 1 else torch.cat(orders))[: sum(sizes)], sizes)


@lru_cache(maxsize=256)  # clients of one size share them
def _sizes(count: int, batch: int, steps: int) -> tuple[int, ...]:
    epoch = [*[batch] * (count // batch), *[count % batch] * (count % batch > 0)]
    return tuple(islice(cycle(epoch), steps))


def sample(count: int, training: Training, epochs: int | None, key: Key, work: float = 1.0) -> Deal:
    """By Poisson: in each step every example takes part by itself, so a batch may also be empty."""
    share = min(1.0, training.batch_size / count)
    batches = [(key / step).poisson(count, share) for step in range(count_steps(count, training, epochs, work))]
    return Deal(torch.cat(batches), tuple(map(len, batches)))


def learn(run: Run, visits: Sequence[Visit], blocks: Callable[..., Block] = Block) -> list[Learned]:
    """Train one client, or several with equal plans side by side."""
    return launch(run, visits, blocks)()


def launch(run: Run, visits: Sequence[Visit], blocks: Callable[..., Block] = Block) -> Callable[[], list[Learned]]:
    """The same in two parts: a GPU is given all the work, and what is handed back waits for it."""
    phases, private = visits[0].plan.phases, visits[0].private
    trained: list[list[Mapping[str, Tensor]]] = [[] for _ in visits]  # by phase
    deltas: list[list[Mapping[str, Tensor]]] = [[] for _ in visits]
    moments = [_carried(run, each) for each in visits]
    played: list[_Played] = []
    for index, phase in enumerate(phases):
        # Longest first: those still at work are then always a leading slice, and none is computed for nothing.
        order = sorted(range(len(visits)), key=lambda place: -len(visits[place].deals[index]))
        ranked = [visits[place] for place in order]
        contexts = [each.ctx for each in ranked]
        draws = [_draw(run, each, index) for each in ranked] if private else []
        now = [{**visits[place].ctx.anchor, **_joined(trained[place])} for place in order]
        block = blocks(run, phase, contexts, now, [moments[place] for place in order], private, draws)
        deals = [each.deals[index] for each in ranked]
        losses = [block.step(batch) for batch in stage([each.examples for each in ranked], deals, block.device)]
        moved, largest, squares = block.moved()
        for place, params, delta in zip(order, block.params(), moved, strict=True):
            trained[place].append(params)
            deltas[place].append(delta)
        if run.method.carry_optimizer or len(phases) > 1:
            for place, state in zip(order, block.states([len(deal) for deal in deals]), strict=True):
                moments[place] = {slot: {**moments[place].get(slot, {}), **part} for slot, part in state.items()}
        played.append(_Played(order, losses, largest, squares))
    counts = [tuple(map(len, each.deals)) for each in visits]
    steps = {each: _steps(phases, each) for each in {*counts}}

    def wait() -> list[Learned]:
        losses, finite = _fetch(played, len(visits))
        for each, parts in zip(played, zip(*deltas, strict=True), strict=True):  # by phase
            _tell_squares(each, parts)
        return [
            Learned(
                params=_joined(trained[place]),
                steps=steps[counts[place]],
                losses=losses[place],
                optimizer=moments[place],
                delta=known(_joined(deltas[place]), finite),
            )
            for place in range(len(visits))
        ]

    return wait


@dataclass(frozen=True)
class _Played:
    """What a GPU may still be at work on: a phase's losses, and what is to be known of its deltas."""

    order: list[int]  # of clients, as (client,) in the losses
    losses: list[Tensor]  # for each step
    largest: Tensor
    squares: Tensor | None  # (client, name), or (client, 1) of all names together


def _fetch(played: Sequence[_Played], clients: int) -> tuple[list[list[float]], bool]:
    """Each client's losses, and whether all deltas are finite; in one go, since it waits for the GPU."""
    losses: list[list[float]] = [[] for _ in range(clients)]
    parts = [part for each in played for part in (*each.losses, each.largest.unsqueeze(0))]
    fetched = iter(torch.cat(parts).tolist() if parts else [])
    finite = True
    for each in played:
        for step in each.losses:
            for place, loss in zip(each.order[: step.shape[0]], fetched, strict=False):  # the leading clients'
                losses[place].append(loss)
        finite = math.isfinite(next(fetched)) and finite
    return losses, finite


def _tell_squares(played: _Played, deltas: Sequence[Mapping[str, Tensor]]) -> None:
    if played.squares is not None:
        for place, row in zip(played.order, played.squares.tolist(), strict=True):
            delta = deltas[place]
            assert isinstance(delta, Known | Laid)
            delta.square = math.fsum(row)
            if len(row) == len(delta):
                delta.squares = dict(zip(delta, row, strict=True))


def _draw(run: Run, each: Visit, phase: int) -> Draw:
    return Draw(each.key / "noise" / phase, min(run.training.batch_size, len(each.examples)))


def _steps(phases: Sequence[Phase], counts: Sequence[int]) -> dict[str, int]:
    total = Counter[str]()
    for phase, count in zip(phases, counts, strict=True):
        total.update(dict.fromkeys(phase.names, count))
    return total


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """Of what several phases did to a name, the last."""
    if len(parts) == 1:
        return parts[0]
    whole = {name: value for part in parts for name, value in part.items()}
    return tree.select(whole, whole)


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
        slots |= tree.within(send, plan.up)
        for slot, part in tree.within(remember, plan.train).items():
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
    return update, ClientState(tree.own(personal), {slot: tree.own(part) for slot, part in memory.items()})


def _carried(run: Run, each: Visit) -> dict[str, Tensors]:
    if not run.method.carry_optimizer:
        return {}
    memory = each.state.memory
    return {slot.removeprefix(_OPTIMIZER): part for slot, part in memory.items() if slot.startswith(_OPTIMIZER)}


def kind(run: Run, each: Visit) -> Hashable:
    """Clients fit one block if this is equal: model, plan, what they remember, and ages where the optimizer counts."""
    alike = id(each.ctx.model), each.plan
    memory = frozenset((slot, frozenset(part)) for slot, part in each.ctx.memory.items())
    if not run.training.optimizer.ages:
        return alike, memory
    ages = _carried(run, each).get("age", {})
    born = tuple(int(ages[name]) if name in ages else 0 for name in sorted(each.plan.train)) if ages else ()
    # Phases that share a name hand its age on, and that depends on how many steps the earlier one took.
    apart = sum(len(phase.names) for phase in each.plan.phases) == len(each.plan.train)
    return alike, memory, born, None if apart else tuple(len(batches) for batches in each.deals)
