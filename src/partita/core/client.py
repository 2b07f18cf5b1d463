"""One client's round: begin, train, finish. A pure function of the job, the client's state and its data.

`begin_round` and `finish_round` call the hooks of client rules and transforms, one client at a time. The package
`training` does the training in between, for one client or several at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

import torch

from partita.core import tensors
from partita.core.batch_schedule import (
    BatchSchedule,
    group_by_length,
    lengths_to_group,
    poisson_batches,
    shuffled_batches,
)
from partita.core.client_rule import ClientRule, Context, ForbiddenData, overrides
from partita.core.data import Batch, Examples
from partita.core.dp_settings import PrivacySettings
from partita.core.group_units import group_units
from partita.core.method_error import MethodError
from partita.core.model import Model
from partita.core.plan import NO_NAMES, Phase, Plan, RoundInfo, plan_for
from partita.core.rng import Key
from partita.core.settings import Run
from partita.core.tensors import Names, Slots, Tensors
from partita.core.update import ComputedWork, DeltaFacts, Update
from partita.core.update_transform import UpdateTransform

OPTIMIZER_PREFIX = "optimizer."  # prefix of the memory slots that hold the optimizer state


class ClientError(RuntimeError):
    """A failure at one client."""

    def __init__(self, client: str, reason: str) -> None:
        super().__init__(f"client '{client}': {reason}")
        self.client, self.reason = client, reason


@dataclass(frozen=True)
class Job:
    """What the server asks of one client in one round.

    Attributes:
        round: The round, from 0.
        client: The client's name.
        params: The parameters in the client's `plan.down`.
        stale: The names of `params` that must travel; the client already holds the others.
        slots: The slots from `ServerRule.send`, restricted to `plan.train`.
        signal: The result of `ServerRule.signal`.
        personal_epochs: Epochs for which the client trains what it keeps, on a copy, before an evaluation. For clients
            that take no part. They are simulated, so this is in no message.
    """

    round: int
    client: str
    params: Tensors
    stale: Names
    slots: Slots = field(default_factory=dict)
    signal: Mapping[str, float] = field(default_factory=dict)
    personal_epochs: int = 0


@dataclass(frozen=True)
class ClientState:
    """What stays with a client between rounds.

    Attributes:
        personal: The parameters that its plans kept (`plan.keep`).
        memory: The slots of its rules and transforms; also the optimizer state if `Method.carry_optimizer` is set.
    """

    personal: Tensors = field(default_factory=dict)
    memory: Slots = field(default_factory=dict)


@dataclass(frozen=True)
class ClientRound:
    """One client's round after `begin_round`, ready for training.

    Attributes:
        job: The job.
        state: The client's state before the round.
        plan: The narrowed plan.
        ctx: The context for the hooks of client rules.
        examples: The client's training examples; with privacy by group, its groups.
        schedules: The batches of each phase in `plan.phases`.
        key: The random key of this client and round.
        metrics: The metrics of all `LayerSelection` results.
        dp_settings: The DP-SGD settings; None for training without example-level privacy.
        start: The values of `ClientRule.start`, which replace those of the anchor as the start of training.
        optimizer: The optimizer state by slot from which training starts; empty to start with a new state.
    """

    job: Job
    state: ClientState
    plan: Plan
    ctx: Context
    examples: Examples
    schedules: tuple[BatchSchedule, ...]
    key: Key
    metrics: Mapping[str, float] = field(default_factory=dict)
    dp_settings: PrivacySettings | None = None
    start: Tensors = field(default_factory=dict)
    optimizer: Slots = field(default_factory=dict)


@dataclass(frozen=True)
class LocalResult:
    """The result of one client's training.

    Attributes:
        params: The trained parameters, for the names in `plan.train`.
        steps: For each trained name, the number of optimizer steps over all phases.
        losses: The task's loss before each step.
        optimizer: The optimizer state by slot.
        facts: The delta, `params - anchor` for the names in `plan.up`, with what is known about it. Training computes
            it for all clients of a block at once.
        work: How much of what was computed was padding; None if that was not measured.
    """

    params: Mapping[str, torch.Tensor]
    steps: Mapping[str, int]
    losses: Sequence[float]
    optimizer: Slots
    facts: DeltaFacts
    work: ComputedWork | None = None

    @property
    def delta(self) -> Mapping[str, torch.Tensor]:
        """The delta of `facts`."""
        return self.facts.delta


def round_info_of(run: Run, job: Job) -> RoundInfo:
    """Return the RoundInfo of a job, as the server had it when it made the plan."""
    return RoundInfo(job.round, run.rounds, job.client, job.signal)


def client_params(run: Run, model: Model, job: Job, state: ClientState) -> tuple[Plan, Tensors]:
    """Return the client's plan and all its parameters at the start of the round.

    Names in `plan.keep` come from the client's state (from `model.initial` in its first round), names in `plan.down`
    from the job, and all others from `model.initial`.
    """
    plan = plan_for(run.method.plan, model, round_info_of(run, job))
    personal = {name: state.personal.get(name, model.initial[name]) for name in plan.keep}
    return plan, {**model.initial, **job.params, **personal}


def client_model(run: Run, model: Model, job: Job) -> Model:
    """Return the model as this client runs it (`Method.shape`)."""
    shape = run.method.shape
    return shape(model, round_info_of(run, job)) if shape else model


class OneExample:
    """A single example whose contents are never used."""

    def __len__(self) -> int:
        return 1

    def take(self, indices: torch.Tensor) -> Batch:
        return Batch({}, indices)

    def lengths(self, indices: torch.Tensor) -> torch.Tensor:
        return indices + 1


def begin_round(
    run: Run,
    model: Model,
    job: Job,
    state: ClientState,
    examples: Examples,
    fraction: float = 1.0,
    trains: bool = True,
) -> ClientRound:
    """Prepare one client's round: call `ClientRule.memory`, `narrow` and `start`, and draw the batches.

    Args:
        run: The settings.
        model: The model.
        job: The server's job.
        state: The client's state from its last round.
        examples: The client's training examples.
        fraction: The fraction of its steps that the client completes; below 1 for a straggler.
        trains: Whether training follows. If False, as in a dry run, `ClientRule.start` is not called.

    Raises:
        ClientError: If the client has no examples, or if the memory of a rule has a slot that is not its own.
        MethodError: If a rule starts training from a value that does not fit the plan or the model.
    """
    plan, anchor = client_params(run, model, job, state)
    key = (run.secret or run.key) / "round" / job.round / "client" / job.client
    fresh: dict[str, Tensors] = {}
    for rule in run.method.client_rules:
        first = rule.memory(anchor)
        _check_own_slots(job.client, rule, first.keys())
        fresh |= first
    own = frozenset[str]().union(*(rule.slots for rule in run.method.client_rules))
    memory = {slot: part for slot, part in state.memory.items() if slot in own}
    ctx = Context(
        client_model(run, model, job),
        plan,
        anchor,
        job.slots,
        {**fresh, **memory},
        run.lr(job.round),
        notes={},
        round_info=round_info_of(run, job),
        shared_key=run.key / "shared",
    )
    notes: dict[str, Tensors] = {}
    metrics: dict[str, float] = {}
    for index, rule in enumerate(run.method.client_rules):
        if overrides(rule, "narrow"):
            probe = examples if rule.uses_data or not run.method.privacy else ForbiddenData(rule)
            choice = rule.narrow(plan, probe, ctx, key / "narrow" / index)
            plan = plan.narrow(choice.names)
            notes |= choice.notes
            metrics |= choice.metrics
    ctx = replace(ctx, plan=plan, notes=notes)
    start, started = _start_values(run, ctx, examples, key) if trains else ({}, {})
    ctx = replace(ctx, notes={**notes, **started}, shared_key=None)
    dp_settings = run.method.privacy
    poisson = dp_settings is not None and dp_settings.sampling == "poisson"
    if dp_settings is not None and dp_settings.group and len(examples):
        examples = group_units(examples, dp_settings.max_per_group, key / "members")
    schedules = _batch_schedules(
        run, job, plan, examples, key, poisson_batches if poisson else shuffled_batches, fraction
    )
    optimizer = _optimizer_state(run, state, ctx)
    return ClientRound(job, state, plan, ctx, examples, schedules, key, metrics, dp_settings, start, optimizer)


def _start_values(run: Run, ctx: Context, examples: Examples, key: Key) -> tuple[Tensors, Slots]:
    """Call `ClientRule.start` of all rules; return the values from which training starts, and the notes."""
    start: dict[str, torch.Tensor] = {}
    notes: dict[str, Tensors] = {}
    for index, rule in enumerate(run.method.client_rules):
        if overrides(rule, "start"):
            readable = examples if rule.uses_data or not run.method.privacy else ForbiddenData(rule)
            values, own = rule.start({**ctx.anchor, **start}, readable, ctx, key / "start" / index)
            _check_start(run, rule, values, ctx)
            start |= values
            notes |= own
    return start, notes


def _check_start(run: Run, rule: ClientRule, values: Tensors, ctx: Context) -> None:
    what = f"{run.method.name}: {type(rule).__name__}.start returns"
    if stray := values.keys() - ctx.plan.train:
        raise MethodError(
            f"{what} '{min(stray)}', which does not train in this round; return only names in ctx.plan.train"
        )
    for name, value in values.items():
        expected = ctx.anchor[name]
        if (value.shape, value.dtype) != (expected.shape, expected.dtype):
            raise MethodError(
                f"{what} '{name}' of shape {tuple(value.shape)} and type {value.dtype}, but the parameter has shape "
                f"{tuple(expected.shape)} and type {expected.dtype}; return a value like the parameter"
            )


def phases_before_test(run: Run, model: Model, job: Job) -> tuple[Phase, ...]:
    """Return what a client trains on a copy of its model before an evaluation; empty if nothing.

    First the parameters that it keeps and trains in this round, if the job asks for that, then `Method.adapt`.
    """
    adapt = run.method.adapt(model) if run.method.adapt else ()
    if not job.personal_epochs:
        return adapt
    plan = plan_for(run.method.plan, model, round_info_of(run, job))
    personal = plan.keep & plan.train
    return (Phase(personal, job.personal_epochs), *adapt) if personal else adapt


def adaptation_round(
    run: Run, model: Model, job: Job, state: ClientState, examples: Examples, phases: tuple[Phase, ...]
) -> ClientRound:
    """Prepare a round whose result is used for evaluation only.

    The client trains `phases` on a copy of the whole model, without client rules, and sends nothing. The learning rate
    is `Training.adapt_lr` in every round, whatever the schedule.

    Args:
        run: The settings.
        model: The model.
        job: The server's job, with the parameters to start from.
        state: The client's state, with the parameters that it keeps.
        examples: The client's training examples.
        phases: What to train; see `phases_before_test`.

    Raises:
        ClientError: If the client has no examples.
    """
    _, anchor = client_params(run, model, job, state)
    key = run.key / "round" / job.round / "client" / job.client / "adapt"
    plan = Plan(phases, up=NO_NAMES, down=NO_NAMES, keep=model.all_names())
    # The schedule is for the shared model. At its end it would leave clients hardly any rate to adapt with.
    lr = run.training.lr if run.training.adapt_lr is None else run.training.adapt_lr
    ctx = Context(client_model(run, model, job), plan, anchor, {}, {}, lr)
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
        raise ClientError(job.client, "has no training examples; add some or remove the client from the population")
    schedules = [
        make_schedule(count, run.training, phase.epochs, key / "batches" / place, fraction)
        for place, phase in enumerate(plan.phases)
    ]
    if run.training.group_by_length:
        lengths = lengths_to_group(examples, torch.arange(count))
        schedules = [group_by_length(schedule, lengths, run.training) for schedule in schedules]
    return tuple(schedules)


def finish_round(run: Run, client_round: ClientRound, learned: LocalResult) -> tuple[Update, ClientState]:
    """Call `ClientRule.finish` and `UpdateTransform.encode`; return the update to send and the state to keep.

    Slots to send are restricted to `plan.up`. Slots to remember are restricted to `plan.train` for rules and to
    `plan.up` for transforms, and merged by name into the memory.

    Args:
        run: The settings.
        client_round: The round from `begin_round`.
        learned: The result of the training.

    Raises:
        ClientError: If a loss is not finite, or if a rule or transform returns a slot that is not its own.
    """
    client, plan, ctx = client_round.job.client, client_round.plan, client_round.ctx
    # Under example-level privacy the loss has no noise, so neither its value nor a failure may reach the server.
    losses = learned.losses if client_round.dp_settings is None else []
    for step, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            raise ClientError(
                client,
                f"the loss is {loss} at step {step} of {len(losses)} in round {client_round.job.round}; "
                "lower training.lr, set training.clip, or check the client's data",
            )
    slots: dict[str, Tensors] = {}
    memory = {slot: dict(part) for slot, part in client_round.state.memory.items()}
    if run.method.sets_optimizer_state:
        ctx = replace(ctx, optimizer=learned.optimizer)
    for rule in run.method.client_rules:
        if not overrides(rule, "finish"):
            continue  # do not build the dict of all parameters for a hook that does not use it
        send, remember = rule.finish({**ctx.anchor, **learned.params}, learned.steps, ctx)
        _check_own_slots(client, rule, send.keys() | remember.keys())
        slots |= tensors.restrict_slots(send, plan.up)
        for slot, part in tensors.restrict_slots(remember, plan.train).items():
            memory[slot] = {**ctx.memory.get(slot, {}), **part}
    if run.method.carry_optimizer:
        for slot, part in learned.optimizer.items():
            memory[OPTIMIZER_PREFIX + slot] = {**memory.get(OPTIMIZER_PREFIX + slot, {}), **part}
    mean = math.fsum(losses) / len(losses) if losses else None
    size = float(len(client_round.examples))
    update = Update(
        client,
        learned.delta,
        slots,
        size,
        learned.steps,
        mean,
        client_round.metrics,
        client_round.job.round,
        learned.facts,
        # Sizes of Poisson batches are secret.
        learned.work if client_round.dp_settings is None else None,
    )
    for index, transform in enumerate(run.method.transforms):
        known = {slot: memory[slot] for slot in sorted(transform.slots & memory.keys())}
        update, remember = transform.encode(update, known, client_round.key / "channel" / index)
        _check_own_slots(client, transform, remember.keys())
        for slot, part in tensors.restrict_slots(remember, plan.up).items():
            memory[slot] = {**known.get(slot, {}), **part}
    kept = {name: learned.params[name] if name in learned.params else ctx.anchor[name] for name in sorted(plan.keep)}
    personal = {**client_round.state.personal, **kept}
    return update, ClientState(
        tensors.clone_views(personal), {slot: tensors.clone_views(part) for slot, part in memory.items()}
    )


def _check_own_slots(client: str, owner: ClientRule | UpdateTransform, returned: AbstractSet[str]) -> None:
    if stray := returned - owner.slots:
        raise ClientError(
            client, f"{type(owner).__name__} returns the slot '{sorted(stray)[0]}', which is not in its slots"
        )


def _optimizer_state(run: Run, state: ClientState, ctx: Context) -> Slots:
    """The state from the client's last round with `Method.carry_optimizer`, or that of the rules; empty for none."""
    found: dict[str, Tensors] = {}
    if run.method.carry_optimizer:
        for slot, part in state.memory.items():
            if slot.startswith(OPTIMIZER_PREFIX):
                found[slot.removeprefix(OPTIMIZER_PREFIX)] = part
    for rule in run.method.client_rules:
        if overrides(rule, "optimizer_state"):
            for slot, part in rule.optimizer_state(ctx).items():
                found[slot] = {**found.get(slot, {}), **part}
    return found
