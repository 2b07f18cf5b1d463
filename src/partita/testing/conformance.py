"""Tests a method against the promises that every method must keep, by short runs on a small federation.

`check_method` raises at the first broken promise. `check_promises` tests all of them and says what it found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from partita.core import tensors
from partita.core.client_rule import overrides
from partita.core.data import Population
from partita.core.method import Method
from partita.core.model import Model
from partita.core.optim import Optimizer
from partita.core.plan import RoundInfo, plan_for
from partita.core.rounds import make_job, rounds
from partita.core.server_rule import ServerRule
from partita.core.update import Update
from partita.engines.dry_run import DryRunEngine
from partita.testing import probes
from partita.testing.hook_purity import check_hooks
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
