"""Tests a method against the promises that every method must keep, by short runs on a small federation.

`check_method` raises at the first broken promise. `check_promises` tests all of them and says what it found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from partita.core import tensors
from partita.core.client import ClientRound, begin_round
from partita.core.client_rule import ClientRule, Context, overrides
from partita.core.data import Population
from partita.core.method import Method
from partita.core.model import Model
from partita.core.optim import Optimizer
from partita.core.plan import RoundInfo, plan_for
from partita.core.rounds import make_job, rounds
from partita.core.server_rule import Server, ServerRule
from partita.core.settings import Run
from partita.core.tensors import Slots, Tensors
from partita.core.update import Update
from partita.engines.dry_run import DryRunEngine
from partita.storage.client_store import ClientStore
from partita.testing import probes
from partita.testing.probes import equal_slots
from partita.testing.promises import (
    ConformanceError,
    NotApplicable,
    NotTested,
    Outcome,
    Promise,
    check_all,
    raise_first,
    require,
)
from partita.testing.toy import ToyPopulation, ToyTransformer
from partita.testing.trial import ROUNDS, Trial, check_resume, faults, run_rounds, same_result

Hook = Callable[[Tensors], Slots]


def check_hooks(run: Run, model: Model, population: Population, server: Server, store: ClientStore) -> None:
    """Check the hooks of all clients in the last round of a run.

    Args:
        run: The settings.
        model: The model.
        population: The clients.
        server: The server after the run.
        store: The clients' state after the run.

    Raises:
        ConformanceError: If a hook modifies its arguments or gives two results.
        NotApplicable: If no rule has one of the hooks.
    """
    if not any(overrides(rule, hook) for rule in run.method.client_rules for hook in ("start", "step_gradient")):
        raise NotApplicable("no client rule has the hooks start or step_gradient")
    for client in population.clients:
        job, _ = make_job(run, model, server, run.rounds - 1, client)
        state = store.load(client, run.rounds)
        each = begin_round(run, model, job, state, population[client].train, trains=False)
        for name, hook in _hooks(run, each):
            _check_pure(name, hook, each.ctx)


def _hooks(run: Run, each: ClientRound) -> Iterator[tuple[str, Hook]]:
    for rule in run.method.client_rules:
        if overrides(rule, "start"):
            yield f"{type(rule).__name__}.start", partial(_started, rule, each)
        if overrides(rule, "step_gradient"):
            yield f"{type(rule).__name__}.step_gradient", partial(_step_gradient, rule, each)


def _check_pure(name: str, hook: Hook, ctx: Context) -> None:
    given: Slots = {"params": tensors.clone_all(ctx.anchor), "anchor": ctx.anchor, **ctx.sent, **ctx.memory}
    held = {slot: tensors.clone_all(part) for slot, part in given.items()}
    one, two = (hook(given["params"]) for _ in range(2))
    require(equal_slots(given, held), f"{name} modifies the tensors that it is given")
    require(equal_slots(one, two), f"{name} gives two results for the same arguments")


def _started(rule: ClientRule, each: ClientRound, params: Tensors) -> Slots:
    values, notes = rule.start(params, each.examples, each.ctx, each.key)
    return {"values": values, **notes}


def _step_gradient(rule: ClientRule, each: ClientRound, params: Tensors) -> Slots:
    batch = each.examples.take(torch.arange(min(8, len(each.examples))))
    ctx = each.ctx
    ctx = Context(ctx.model, ctx.plan, ctx.anchor, ctx.sent, ctx.memory, ctx.lr)  # as in a step

    def gradient_at(point: Tensors) -> Tensors:
        whole = {**params, **point}
        live = {name: whole[name].detach().requires_grad_() for name in sorted(ctx.plan.train)}
        with torch.enable_grad():
            loss = ctx.model.losses(ctx.model({**whole, **live}, batch.inputs), batch.targets).mean()
        grads = torch.autograd.grad(loss, list(live.values()), allow_unused=True)
        return {name: grad for name, grad in zip(live, grads, strict=True) if grad is not None}

    with torch.no_grad():
        return {"grads": rule.step_gradient(gradient_at, params, ctx)}


@dataclass(frozen=True)
class ConformanceReport:
    """Measurements from a successful check.

    Attributes:
        block_difference: Largest difference between blocks and single clients, relative to the slot's largest value.
        bytes_up: Bytes from clients to the server in all rounds.
        bytes_down: Bytes from the server to clients in all rounds.
    """

    block_difference: float
    bytes_up: int
    bytes_down: int


def check_method(
    method: Method,
    model: Model | None = None,
    population: Population | None = None,
    optimizer: Optimizer | None = None,
    tolerance: float = 1e-5,
) -> ConformanceReport:
    """Check a method by several runs on a small federation.

    The default federation takes 2 to 4 seconds of one CPU core: 1.7 for fedavg, 2.2 for scaffold, 4.0 for fedrep.
    `partita check NAME` prints all promises in `PROMISES`.

    Args:
        method: The method.
        model: Default: `ToyTransformer`.
        population: Default: `ToyPopulation`.
        optimizer: Default: AdamW, or SGD if the method does not support AdamW.
        tolerance: Largest relative difference allowed between blocks and single clients.

    Returns:
        The measurements.

    Raises:
        ConformanceError: If the method breaks a promise. The text describes the first one.
    """
    trial = Trial(method, model or ToyTransformer(), population or ToyPopulation(), optimizer, tolerance)
    raise_first(PROMISES, trial)
    traffic = [result.traffic for result in trial.baseline.rounds]
    return ConformanceReport(
        0.0 if method.pool or trial.one_by_one else trial.block_difference,
        sum(sum(each.up.values()) for each in traffic),
        sum(sum(each.down.values()) for each in traffic),
    )


def check_promises(method: Method, model: Model | None = None, population: Population | None = None) -> list[Outcome]:
    """Test all promises of a method, also after a broken one.

    Args:
        method: The method.
        model: Default: `ToyTransformer`.
        population: Default: `ToyPopulation`.

    Returns:
        The outcome of every promise in `PROMISES`.
    """
    return list(check_all(PROMISES, Trial(method, model or ToyTransformer(), population or ToyPopulation())))


def _round_infos(trial: Trial) -> Iterator[RoundInfo]:
    for round in range(ROUNDS):
        for client in trial.population.clients:
            yield RoundInfo(round, ROUNDS, client)


def _check_plan_is_valid(trial: Trial) -> None:
    for round_info in _round_infos(trial):
        plan_for(trial.method.plan, trial.model, round_info)


def _check_plan_is_pure(trial: Trial) -> None:
    for round_info in _round_infos(trial):
        same = trial.method.plan(trial.model, round_info) == trial.method.plan(trial.model, round_info)
        require(same, f"its plan for {round_info.client} in round {round_info.round} differs from one call to the next")


def _observed(name: str, text: str) -> Promise[Trial]:
    """Return a promise that the probes watch."""

    def test(trial: Trial) -> None:
        if name in trial.observed.found:
            raise ConformanceError(trial.observed.found[name])
        if trial.observed.error:
            raise NotTested("the run fails")
        if name not in trial.observed.found.tested:
            raise NotApplicable(probes.NOTHING_TO_TEST[name])

    return Promise(name, text, test, (VALID_PLAN,))


def _check_finishes(trial: Trial) -> None:
    if trial.observed.error:
        raise trial.observed.error


def _check_hooks(trial: Trial) -> None:
    server = trial.baseline.rounds[-1].server
    assert trial.observed.store is not None
    check_hooks(trial.run, trial.model, trial.population, server, trial.observed.store)


def _check_repeatable(trial: Trial) -> None:
    """If the result over the wire is the same, so is that of a plain second run."""
    if not same_result(trial.baseline, trial.over_wire):
        require(
            same_result(trial.baseline, run_rounds(trial.run, trial.model, trial.make())),
            "the same run gives two results, so it depends on outside state",
        )


def _check_messages(trial: Trial) -> None:
    require(
        same_result(trial.baseline, trial.over_wire),
        "its messages are incomplete: with serialized messages the result differs",
    )


def _check_byte_count(trial: Trial) -> None:
    for one, two in zip(trial.baseline.rounds, trial.over_wire.rounds, strict=True):
        require(one.traffic == two.traffic, f"bytes differ with serialized messages in round {one.number}")


def _check_dry_run(trial: Trial) -> None:
    # A dry run cannot predict choices that depend on clients' data or on what the server has seen.
    if any(overrides(rule, "narrow") for rule in trial.method.client_rules):
        raise NotApplicable("clients choose what they send by their data")
    if type(trial.method.server_rule).signal is not ServerRule.signal:
        raise NotApplicable("the plan depends on what the server has seen")
    clients = trial.population.clients
    dry_run = DryRunEngine(trial.run, trial.model, clients, faults(trial.run, clients))
    for one, two in zip(trial.baseline.rounds, rounds(trial.run, trial.model, dry_run), strict=True):
        require(one.traffic == two.traffic, f"the dry run predicts other bytes than were sent in round {one.number}")


def _check_order(trial: Trial) -> None:
    _refuse_single_client(trial)
    server = trial.baseline.rounds[0].server
    jobs = [make_job(trial.run, trial.model, server, 1, client)[0] for client in trial.population.clients]
    forward = {reply.client: reply for reply in trial.make().train(jobs)}
    for reply in trial.make().train(reversed(jobs)):
        other = forward[reply.client]
        if isinstance(reply, Update) and isinstance(other, Update):
            require(
                tensors.equal(reply.delta, other.delta), f"the update of {reply.client} depends on the order of clients"
            )


def _check_resume_from_disk(trial: Trial) -> None:
    check_resume(trial.run, trial.model, trial.make, trial.baseline, 1, "disk")


def _check_resume_from_memory(trial: Trial) -> None:
    _refuse_single_client(trial)
    trial.resume_in_blocks()


def _check_blocks(trial: Trial) -> None:
    """Compare blocks with single clients: with a smooth optimizer in float32, and with the method's own in float64.

    AdamW divides by the gradient's magnitude. Where the gradient is pure rounding error (a key bias, to which softmax
    is invariant), float32 error becomes a full-size step, so any two ways of computing differ. In float64, the error
    falls below AdamW's eps. In float32, SGD is used, or AdamW with a large eps for methods that need AdamW.

    The block sizes differ: of a cohort of three, one comparison has blocks of two and one, the other a single block.
    """
    _refuse_single_client(trial)
    _ = trial.block_difference, trial.wide_blocks  # computing them compares them


def _refuse_single_client(trial: Trial) -> None:
    if trial.method.pool:
        raise NotApplicable("all data is in one place, so there is a single client")
    if trial.one_by_one:
        raise NotApplicable(f"clients of {trial.model.name} train one at a time: {trial.one_by_one}")


VALID_PLAN = "valid plan"
RUNS = "a run finishes"
REPEATABLE = "repeatable"
BLOCKS = "blocks equal single clients"
_PURE = (probes.CLIENT_INPUTS, probes.SERVER_INPUTS, RUNS)

PROMISES: tuple[Promise[Trial], ...] = (
    Promise(
        VALID_PLAN,
        "The plan has only names of the model, and its sets do not contradict each other.",
        _check_plan_is_valid,
    ),
    Promise(
        "pure plan",
        "The plan depends only on the model, the round and the client.",
        _check_plan_is_pure,
        (VALID_PLAN,),
    ),
    _observed(
        probes.PURE_TRANSFORMS,
        "UpdateTransform.encode changes nothing it is given, and gives one result for the same arguments.",
    ),
    _observed(probes.OWN_SLOTS, "UpdateTransform.encode remembers only the slots that the transform declares."),
    _observed(probes.CLIENT_INPUTS, "Client rules do not change in place what the server sent."),
    _observed(probes.SERVER_INPUTS, "The server rule returns new tensors and does not change the old ones in place."),
    _observed(probes.KEPT_STAYS, "Parameters that the plan keeps with the client never appear in a message."),
    _observed(probes.ONLY_PLANNED, "An update has only names that the plan sends up."),
    _observed(probes.FROZEN_STAYS, "The server's parameters that no client trained stay the same, bit for bit."),
    _observed(
        probes.NOT_COPIED, "Parameters that did not change remain the same objects, so that they are not sent again."
    ),
    _observed(
        probes.NO_GLOBAL_RANDOM, "Random numbers come from keys, not from the global state of torch, numpy or Python."
    ),
    Promise(RUNS, f"A run of {ROUNDS} rounds with dropouts and stragglers finishes.", _check_finishes, (VALID_PLAN,)),
    Promise(
        "pure hooks",
        "ClientRule.start and step_gradient change nothing they are given, and give one result for the same arguments.",
        _check_hooks,
        (RUNS,),
    ),
    Promise(REPEATABLE, "The same run gives the same result, bit for bit.", _check_repeatable, _PURE),
    Promise(
        "complete messages",
        "Clients that hold only what they were sent, serialized, give the same result.",
        _check_messages,
        (REPEATABLE,),
    ),
    Promise(
        "exact byte count",
        "The bytes that are recorded are the bytes that are sent.",
        _check_byte_count,
        (REPEATABLE,),
    ),
    Promise("predictable bytes", "A dry run, without training, predicts the bytes.", _check_dry_run, (REPEATABLE,)),
    Promise(
        "any order of clients",
        "A client's update does not depend on the clients before it.",
        _check_order,
        (REPEATABLE,),
    ),
    Promise(
        "resume from disk",
        "A run that is resumed from its checkpoint gives the same result and bytes, bit for bit.",
        _check_resume_from_disk,
        (REPEATABLE,),
    ),
    Promise(
        BLOCKS,
        "Clients that train together in a block give the result of single clients, up to rounding.",
        _check_blocks,
        (REPEATABLE,),
    ),
    Promise(
        "resume from memory",
        "So does a run in blocks, with client state in memory.",
        _check_resume_from_memory,
        (BLOCKS,),
    ),
)
