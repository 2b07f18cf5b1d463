"""One client's visit: visit -> learn -> reply, a pure function of the job, the client's state and its data.

Rules are written for one client. `learn` takes one visit and calls them plainly, or a block of visits with equal plans
and lifts them with `vmap`: clients share no arithmetic, so the gradient of the sum of their losses is each one's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from partita.core import tree
from partita.core.method import Context, Local, Update
from partita.core.model import Batch, Examples, Model
from partita.core.optim import clip
from partita.core.plan import NONE, Phase, Plan, Turn, plan_for
from partita.core.rng import Key
from partita.core.run import Run, Training
from partita.core.tree import Names, Slots, Tensors


class ClientFault(RuntimeError):
    """Something went wrong at one client."""

    def __init__(self, client: str, reason: str) -> None:
        super().__init__(f"client '{client}': {reason}")
        self.client, self.reason = client, reason


class LiftError(ValueError):
    """A model or rule that vmap cannot lift."""


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
    deals: tuple[list[Tensor], ...]  # for each phase, the batches as indices
    key: Key


@dataclass(frozen=True)
class Learned:
    params: Tensors  # of the trained names
    steps: Mapping[str, int]
    losses: Tensor  # (step,) the task's loss before each step
    optimizer: Slots


def assemble(run: Run, model: Model, job: Job, state: ClientState) -> tuple[Plan, Tensors]:
    """The client's plan and its full parameters: the server's, its own, and for the rest the model's as loaded."""
    plan = plan_for(run.method.plan, model, Turn(job.round, run.rounds, job.client, job.signal))
    personal = {name: state.personal.get(name, model.initial[name]) for name in plan.keep}
    return plan, {**model.initial, **job.params, **personal}


def visit(run: Run, model: Model, job: Job, state: ClientState, examples: Examples, work: float = 1.0) -> Visit:
    """Lay out one client's round. `work` below 1 is a straggler, who gets through that share of its steps."""
    plan, anchor = assemble(run, model, job, state)
    key = run.key / "round" / job.round / "client" / job.client
    fresh = {slot: value for rule in run.method.local for slot, value in rule.memory(anchor).items()}
    ctx = Context(model, plan, anchor, job.slots, {**fresh, **state.memory}, run.rate(job.round))
    for index, rule in enumerate(run.method.local):
        if type(rule).narrow is not Local.narrow:
            plan = plan.narrow(rule.narrow(plan, examples, ctx, key / "narrow" / index))
    return _lay_out(run, Visit(job, state, plan, replace(ctx, plan=plan), examples, (), key), work)


def trial(run: Run, model: Model, job: Job, state: ClientState, examples: Examples, phases: tuple[Phase, ...]) -> Visit:
    """A visit whose result is for evaluation only: the client adapts a copy of the whole model, and nothing travels."""
    _, anchor = assemble(run, model, job, state)
    key = run.key / "round" / job.round / "client" / job.client / "adapt"
    plan = Plan(phases, up=NONE, down=NONE, keep=model.every())
    ctx = Context(model, plan, anchor, {}, {}, run.rate(job.round))
    return _lay_out(run, Visit(job, ClientState(), plan, ctx, examples, (), key), 1.0)


def _lay_out(run: Run, each: Visit, work: float) -> Visit:
    if not len(each.examples):
        raise ClientFault(each.job.client, "has no training examples; give it some or leave it out of the population")
    deals = tuple(
        deal(len(each.examples), run.training, phase.epochs, each.key / "batches" / index, work)
        for index, phase in enumerate(each.plan.phases)
    )
    return replace(each, deals=deals)


def deal(count: int, training: Training, epochs: int | None, key: Key, work: float = 1.0) -> list[Tensor]:
    """Batches as indices: every epoch is a new permutation, and its last batch may be short."""
    size = training.batch_size
    per_epoch = -(-count // size)
    total = training.steps if training.steps is not None and epochs is None else (epochs or training.epochs) * per_epoch
    total = max(1, int(total * work))
    batches: list[Tensor] = []
    while len(batches) < total:
        batches.extend((key / (len(batches) // per_epoch)).permutation(count).split(size))
    return batches[:total]


def learn(run: Run, model: Model, visits: Sequence[Visit]) -> list[Learned]:
    """Train one client, or several with equal plans side by side."""
    now = [dict(each.ctx.anchor) for each in visits]
    moments = [_carried(run, each) for each in visits]
    steps = [Counter[str]() for _ in visits]
    losses: list[list[Tensor]] = [[] for _ in visits]
    for index, phase in enumerate(visits[0].plan.phases):
        # Longest first: those still at work are then always a leading slice, and none is computed for nothing.
        order = sorted(range(len(visits)), key=lambda place: -len(visits[place].deals[index]))
        ranked = [visits[place] for place in order]
        block = _Block(run, model, phase, ranked, [now[place] for place in order], [moments[place] for place in order])
        for step in range(len(ranked[0].deals[index])):
            batches = [each.examples.take(each.deals[index][step]) for each in ranked if len(each.deals[index]) > step]
            for place, loss in zip(order, block.step(batches), strict=False):
                losses[place].append(loss)
        for rank, place in enumerate(order):
            count = len(visits[place].deals[index])
            now[place].update(block.params(rank))
            moved = block.state(rank, count)
            moments[place] = {slot: {**moments[place].get(slot, {}), **part} for slot, part in moved.items()}
            steps[place].update(dict.fromkeys(phase.names, count))
    return [
        Learned(
            params=tree.select(now[place], each.plan.train),
            steps=steps[place],
            losses=torch.stack(losses[place]) if losses[place] else torch.zeros(0),
            optimizer=moments[place],
        )
        for place, each in enumerate(visits)
    ]


def reply(run: Run, visit: Visit, learned: Learned) -> tuple[Update, ClientState]:
    """What the client sends and what it keeps; whatever a rule returns is gated by the plan."""
    client, plan, ctx = visit.job.client, visit.plan, visit.ctx
    if not bool(torch.isfinite(learned.losses).all()):
        step = int((~torch.isfinite(learned.losses)).nonzero()[0])
        raise ClientFault(
            client,
            f"the loss is {learned.losses[step].item()} at step {step + 1} of {len(learned.losses)} in round "
            f"{visit.job.round}; lower training.lr, set training.clip, or look at the client's data",
        )
    after = {**ctx.anchor, **learned.params}
    slots: dict[str, Tensors] = {}
    memory = {slot: dict(part) for slot, part in visit.state.memory.items()}
    for rule in run.method.local:
        send, remember = rule.finish(after, learned.steps, ctx)
        if stray := (send.keys() | remember.keys()) - rule.slots:
            raise ClientFault(client, f"{type(rule).__name__} hands back the slot '{sorted(stray)[0]}', not among its own")
        slots |= tree.within(send, plan.up)
        for slot, part in tree.within(remember, plan.train).items():
            memory[slot] = {**ctx.memory.get(slot, {}), **part}
    if run.method.carry_optimizer:
        for slot, part in learned.optimizer.items():
            memory[_OPTIMIZER + slot] = {**memory.get(_OPTIMIZER + slot, {}), **part}
    delta = tree.subtract(tree.select(after, plan.up), ctx.anchor)
    loss = float(learned.losses.mean()) if len(learned.losses) else None
    update = Update(client, delta, slots, float(len(visit.examples)), learned.steps, loss)
    for index, transform in enumerate(run.method.channel):
        update = transform.encode(update, visit.key / "channel" / index)
    personal = {**visit.state.personal, **tree.select(after, plan.keep)}
    return update, ClientState(personal, memory)


_OPTIMIZER = "optimizer."


def _carried(run: Run, each: Visit) -> dict[str, Tensors]:
    if not run.method.carry_optimizer:
        return {}
    memory = each.state.memory
    return {slot.removeprefix(_OPTIMIZER): part for slot, part in memory.items() if slot.startswith(_OPTIMIZER)}


def age(each: Visit) -> tuple[int, ...]:
    """How many steps each name of the client's optimizer has behind it."""
    ages = each.state.memory.get(_OPTIMIZER + "age", {})
    return tuple(int(ages[name]) if name in ages else 0 for name in sorted(each.plan.train))


class _Block:
    """One phase of one client or of several side by side; a leading dimension (client, ...) appears with the second."""

    def __init__(
        self,
        run: Run,
        model: Model,
        phase: Phase,
        ranked: Sequence[Visit],
        now: Sequence[Tensors],
        moments: Sequence[Slots],
    ) -> None:
        self.run, self.model, self.plan, self.lr = run, model, ranked[0].plan, ranked[0].ctx.lr
        self.many = len(ranked) > 1
        self.device = next(iter(now[0].values())).device
        names = sorted(phase.names)
        # Clones, since the optimizer moves them in place.
        self.live = {name: self._join([each[name] for each in now]) for name in names}
        fresh = run.training.optimizer.init({name: now[0][name] for name in names})
        self.moments = {
            slot: {name: self._join([each.get(slot, start).get(name, start[name]) for each in moments]) for name in names}
            for slot, start in fresh.items()
        }
        ages = moments[0].get("age", {})
        self.born = {name: int(ages[name]) if name in ages else 0 for name in names}
        self.steps = 0
        self.shared = [
            _share([{name: value for name, value in each.items() if name not in phase.names} for each in now]),
            _share([each.ctx.anchor for each in ranked]),
            *(_share([part(each) for each in ranked]) for part in (_sent, _memory)),
        ]

    def step(self, batches: Sequence[Batch]) -> list[Tensor]:
        """One step of the leading clients; the others have finished. Returns each one's loss."""
        count = len(batches)
        live = {name: self._lead(value, count).detach().requires_grad_() for name, value in self.live.items()}
        fixed = [_lead_shared(part, count) if self.many else part for part in self.shared]
        batch = _place(_collate(batches) if self.many else batches[0], self.device)
        given = [batch.inputs, batch.targets, batch.mask]
        dims = [0, *(dims for _, dims in self.shared), 0, 0, None if batch.mask is None else 0]
        values = [value for value, _ in fixed]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.run.training.precision == "bfloat16"):
            total, task = self._lift(self._objective, dims)(live, *values, *given)
        slopes = torch.autograd.grad(total.sum(), list(live.values()), allow_unused=True)
        grads = {name: slope for name, slope in zip(live, slopes, strict=True) if slope is not None}
        with torch.no_grad():
            if self._corrects():
                grads = self._lift(self._correct, dims[:1] + dims[2:5])(grads, *values[1:])
            self.steps += 1
            ages = self._ages(self.steps)
            moments = {slot: {k: self._lead(v, count) for k, v in part.items()} for slot, part in self.moments.items()}
            self.run.training.optimizer.step(
                {name: self._lead(value, count) for name, value in self.live.items()}, grads, moments, self.lr, ages
            )
        return list(task.detach().unbind()) if self.many else [task.detach()]

    def params(self, rank: int) -> Tensors:
        return {name: self._one(value, rank) for name, value in self.live.items()}

    def state(self, rank: int, steps: int) -> dict[str, Tensors]:
        """The optimizer's, for a client that took so many of the block's steps."""
        state = {slot: {k: self._one(v, rank) for k, v in part.items()} for slot, part in self.moments.items()}
        if self.run.training.optimizer.ages:
            state["age"] = {name: torch.tensor(years) for name, years in self._ages(steps).items()}
        return state

    def _ages(self, steps: int) -> dict[str, int]:
        return {name: years + steps for name, years in self.born.items()}

    def _objective(
        self, live: Tensors, rest: Tensors, anchor: Tensors, sent: Slots, memory: Slots,
        inputs: Tensors, targets: Tensor, mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx = Context(self.model, self.plan, anchor, sent, memory, self.lr)
        params = {**rest, **live}
        out = self.model(params, inputs)
        losses = self.model.losses(out, targets)  # (example,)
        task = losses.mean() if mask is None else (losses * mask).sum() / mask.sum()
        penalties = (rule.penalty(out, params, Batch(inputs, targets, mask), ctx) for rule in self.run.method.local)
        return sum((penalty for penalty in penalties if penalty is not None), start=task), task

    def _corrects(self) -> bool:
        corrected = any(type(rule).gradient is not Local.gradient for rule in self.run.method.local)
        return corrected or self.run.training.clip is not None

    def _correct(self, grads: Tensors, anchor: Tensors, sent: Slots, memory: Slots) -> Tensors:
        ctx = Context(self.model, self.plan, anchor, sent, memory, self.lr)
        for rule in self.run.method.local:
            grads = rule.gradient(grads, ctx)
        limit = self.run.training.clip
        return grads if limit is None else clip(grads, tree.norm(grads), limit)

    def _lift(self, function: Callable[..., Any], dims: list[Any]) -> Callable[..., Any]:
        if not self.many:
            return function
        lifted = torch.vmap(function, in_dims=tuple(dims))

        def call(*parts: Any) -> Any:
            try:
                return lifted(*parts)
            except RuntimeError as error:
                raise LiftError(
                    f"vmap cannot lift {self.model.name} with {self.run.method.name} over clients: {error}; "
                    "set engine.block = 1 to train clients one by one"
                ) from error

        return call

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(parts)) if self.many else parts[0].clone()

    def _lead(self, value: Tensor, count: int) -> Tensor:
        return value[:count] if self.many else value

    def _one(self, value: Tensor, rank: int) -> Tensor:
        return value[rank].clone() if self.many else value


def _sent(each: Visit) -> Slots:
    return each.ctx.sent


def _memory(each: Visit) -> Slots:
    return {slot: part for slot, part in each.ctx.memory.items() if not slot.startswith(_OPTIMIZER)}


def _share(parts: Sequence[Any]) -> tuple[Any, Any]:
    """(value, vmap dimension) of nested dicts: what all clients hold as one object is held once, the rest is stacked."""
    first = parts[0]
    if isinstance(first, Mapping):
        pairs = {name: _share([part[name] for part in parts]) for name in first}
        return {name: value for name, (value, _) in pairs.items()}, {name: dim for name, (_, dim) in pairs.items()}
    if all(part is first for part in parts):
        return first, None
    return torch.stack(list(parts)), 0


def _lead_shared(part: tuple[Any, Any], count: int) -> tuple[Any, Any]:
    value, dims = part
    if isinstance(value, Mapping):
        return {name: _lead_shared((value[name], dims[name]), count)[0] for name in value}, dims
    return (value if dims is None else value[:count]), dims


def _collate(batches: Sequence[Batch]) -> Batch:
    """(client, example, ...): short batches are padded with their first example, which the mask then leaves out."""
    sizes = [len(batch.targets) for batch in batches]
    longest = max(sizes)

    def pad(value: Tensor) -> Tensor:
        missing = longest - len(value)
        return torch.cat([value, value[:1].expand(missing, *value.shape[1:])]) if missing else value

    def join(values: Sequence[Tensor]) -> Tensor:
        return torch.stack([pad(value) for value in values])

    inputs = {name: join([batch.inputs[name] for batch in batches]) for name in batches[0].inputs}
    mask = None
    if min(sizes) < longest:
        mask = (torch.arange(longest) < torch.tensor(sizes).unsqueeze(1)).float()  # (client, example)
    return Batch(inputs, join([batch.targets for batch in batches]), mask)


def _place(batch: Batch, device: torch.device) -> Batch:
    if batch.targets.device == device:
        return batch
    mask = None if batch.mask is None else batch.mask.to(device, non_blocking=True)
    return Batch(tree.to(batch.inputs, device), batch.targets.to(device, non_blocking=True), mask)
