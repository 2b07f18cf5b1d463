"""Tests a method against the promises that every method must keep, by short runs on a small federation.

`check_method` raises at the first broken promise. `check_promises` tests all of them and says what it found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch

from partita.core import tensors
from partita.core.client_rule import overrides
from partita.core.data import Population
from partita.core.method import Method
from partita.core.model import Model
from partita.core.optim import SGD, AdamW, Optimizer
from partita.core.plan import RoundInfo, plan_for
from partita.core.rng import Key
from partita.core.rounds import Engine, RoundResult, initial_server, make_job, rounds
from partita.core.server_rule import Server, ServerRule
from partita.core.settings import Run, Training
from partita.core.tensors import Tensors
from partita.core.update import Update
from partita.engines.availability import Availability
from partita.engines.dry_run import DryRunEngine
from partita.engines.simulation import SimulationEngine
from partita.storage import checkpoint
from partita.storage.client_store import ClientStore, DiskStore, MemoryStore
from partita.storage.initial_values import InitialValues
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
from partita.testing.toy import Float64Model, Float64Population, PooledPopulation, ToyPopulation, ToyTransformer

ROUNDS = 6


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


@dataclass(frozen=True)
class RunTrace:
    """The results of all rounds of a run, and the clients' states after it."""

    rounds: list[RoundResult]
    states: dict[str, Tensors]  # client -> its state, keyed by "slot/name"

    @property
    def params(self) -> Tensors:
        """The global model after the last round."""
        return self.rounds[-1].server.params


@dataclass(frozen=True)
class Observation:
    """What the probes saw in one run.

    Attributes:
        found: The broken promises.
        trace: The run; None if it failed.
        error: Why it failed; None if it did not.
        store: The clients' state after the run.
    """

    found: probes.Violations
    trace: RunTrace | None = None
    error: Exception | None = None
    store: ClientStore | None = None


Maker = Callable[..., SimulationEngine]


class Trial:
    """A method on a small federation, and the runs that several promises share.

    Args:
        method: The method.
        model: The model, before the method extends it.
        population: The clients.
        optimizer: Default: AdamW, or SGD if the method does not support AdamW.
        tolerance: Largest relative difference allowed between blocks and single clients.
    """

    def __init__(
        self,
        method: Method,
        model: Model,
        population: Population,
        optimizer: Optimizer | None = None,
        tolerance: float = 1e-5,
    ) -> None:
        own: Optimizer = AdamW(weight_decay=0.1)
        training = Training(
            lr=0.02, optimizer=optimizer or (own if method.supports_optimizer(own.name) else SGD()), batch_size=8
        )
        self.method, self.tolerance = method, tolerance
        self.model = method.extend(model, Key(5)) if method.extend else model
        self.population = PooledPopulation(population) if method.pool else population
        # One run with drift is enough: the baseline. It takes a tenth of the time and changes no result.
        self.run = Run(method, training, rounds=ROUNDS, key=Key(7), cohort=1 if method.pool else 0.5, drift=False)
        self.make = _maker(self.run, self.model, self.population)

    @cached_property
    def one_by_one(self) -> str:
        """Why clients of the model cannot train in a block; "" if they can."""
        first = self.population[self.population.clients[0]].train
        return self.model.why_one_by_one(first.take(torch.zeros(1, dtype=torch.long)).inputs)

    @cached_property
    def observed(self) -> Observation:
        """A run with drift under all probes."""
        found = probes.Violations()
        transforms = tuple(probes.TransformProbe(each, found) for each in self.method.transforms)
        run = replace(self.run, method=replace(self.method, transforms=transforms), drift=True)
        before, store = probes.RandomStates(), None
        try:
            engine = _maker(run, self.model, self.population)()
            store = engine.store
            probe = probes.EngineProbe(self.run, self.model, engine, found)
            trace, error = _run_rounds(run, self.model, engine, probe), None
        except Exception as failure:
            trace, error = None, failure
        used = before.used()
        broken = f"it draws from {' and '.join(used)} global random state"
        found.require(probes.NO_GLOBAL_RANDOM, not used, broken)
        return Observation(found, trace, error, store)

    @property
    def baseline(self) -> RunTrace:
        """The run that others are compared with."""
        if self.observed.trace is None:
            raise NotTested("the run fails")
        return self.observed.trace

    @cached_property
    def over_wire(self) -> RunTrace:
        """The run with serialized messages, and clients that hold only what they were sent."""
        return _run_rounds(self.run, self.model, self.make(wire=True))

    @cached_property
    def block_difference(self) -> float:
        """The largest difference between blocks and single clients with SGD in float32."""
        candidates: tuple[Optimizer, ...] = (SGD(momentum=0.9), AdamW(eps=0.1), self.run.training.optimizer)
        optimizer = next(each for each in candidates if self.method.supports_optimizer(each.name))
        run = replace(self.run, training=replace(self.run.training, optimizer=optimizer))
        make = _maker(run, self.model, self.population)
        return _compare_blocks(run, self.model, make, self._block(2), self.tolerance)[0]

    @cached_property
    def wide_blocks(self) -> RunTrace:
        """The run in blocks with the method's own optimizer in float64, compared with single clients."""
        return _compare_blocks(self.run, self.wide_model, self.wide_make, self._block(5), self.tolerance)[1]

    @cached_property
    def wide_model(self) -> Model:
        """The model in float64."""
        return Float64Model(self.model)

    @property
    def wide_make(self) -> Maker:
        """Makes engines of the model in float64."""
        return _maker(self.run, self.wide_model, Float64Population(self.population))

    def resume_in_blocks(self) -> None:
        """Resume the run of `wide_blocks` halfway, with state in memory."""
        _check_resume(
            self.run, self.wide_model, self.wide_make, self.wide_blocks, ROUNDS // 2, "memory", self._block(5)
        )

    def _block(self, most: int) -> int:
        return min(most, self.run.cohort_size(len(self.population.clients)))


def _faults(run: Run, clients: Sequence[str]) -> Availability:
    """Let some clients drop out and some straggle, with at least one answer in every round."""
    if run.method.pool:
        return Availability()
    availability, trace = Availability(client_dropout=0.15, straggler_rate=0.3), {}
    for round in range(run.rounds):
        first, *others = run.draw_cohort(round, clients)
        if not any(availability.completed_fraction(run.key, round, client) for client in (first, *others)):
            trace[round, first] = 1.0
    return replace(availability, trace=trace)


def _maker(run: Run, model: Model, population: Population) -> Maker:
    def make(**options: object) -> SimulationEngine:
        return SimulationEngine(run, model, population, availability=_faults(run, population.clients), **options)  # type: ignore[arg-type]

    return make


def _run_rounds(
    run: Run,
    model: Model,
    engine: SimulationEngine,
    probe: probes.EngineProbe | None = None,
    server: Server | None = None,
    start: int = 0,
) -> RunTrace:
    probed_engine: Engine = probe or engine
    results = []
    for result in rounds(run, model, probed_engine, server, start):
        if probe:
            probe.after(result)
        results.append(result)
    return RunTrace(results, states_of(run, engine))


def states_of(run: Run, engine: SimulationEngine) -> dict[str, Tensors]:
    """Return every client's state after the run, keyed by "slot/name"."""
    states = {}
    for client in engine.clients():
        state = engine.store.load(client, run.rounds)
        slots = {"personal": state.personal, **state.memory}
        states[client] = {f"{slot}/{name}": value for slot, part in slots.items() for name, value in part.items()}
    return states


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
    if not _same(trial.baseline, trial.over_wire):
        require(
            _same(trial.baseline, _run_rounds(trial.run, trial.model, trial.make())),
            "the same run gives two results, so it depends on outside state",
        )


def _check_messages(trial: Trial) -> None:
    require(
        _same(trial.baseline, trial.over_wire),
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
    dry_run = DryRunEngine(trial.run, trial.model, clients, _faults(trial.run, clients))
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
    _check_resume(trial.run, trial.model, trial.make, trial.baseline, 1, "disk")


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


def _check_resume(
    run: Run, model: Model, make: Maker, baseline: RunTrace, stop: int, kind: Literal["disk", "memory"], block: int = 1
) -> None:
    """Check that a run that is resumed after `stop` rounds gives the result and the bytes of the baseline."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        disk = DiskStore(folder / "clients")
        store = disk if kind == "disk" else MemoryStore(disk)
        stream = rounds(run, model, make(store=store, block=block))
        for _ in range(stop):
            result = next(stream)
        list(islice(rounds(run, model, make()), 2))  # overwrites any hidden state with that of another round
        store.commit(stop)
        path = checkpoint.save(
            folder / "server", stop, result.server, initial=InitialValues(initial_server(run, model))
        )
        done, server = checkpoint.load(path, initial=InitialValues(initial_server(run, model)))
        again = _run_rounds(run, model, make(store=DiskStore(disk.folder), block=block), server=server, start=done)
    require(_same(baseline, again), f"resumed after round {stop - 1} with state in {kind}, the result differs")
    late = [result.traffic for result in baseline.rounds[stop:]]
    require(late == [result.traffic for result in again.rounds], f"resumed after round {stop - 1}, bytes differ")


def _compare_blocks(run: Run, model: Model, make: Maker, block: int, tolerance: float) -> tuple[float, RunTrace]:
    """Compare a run in blocks with one of single clients; return the largest difference, and the run in blocks."""
    worst, baseline, other = 0.0, _run_rounds(run, model, make()), _run_rounds(run, model, make(block=block))
    for owner in ("the server's", *baseline.states):
        one, two = (_params(trace) if owner == "the server's" else trace.states[owner] for trace in (baseline, other))
        for name, value in one.items():
            # Relative to the whole slot: the momentum of a key bias is pure rounding error.
            slot = [tensor for key, tensor in one.items() if key.partition("/")[0] == name.partition("/")[0]]
            scale = max(float(tensor.abs().max()) for tensor in slot)
            difference = float((value - two[name]).abs().max()) / (scale or 1.0)
            worst = max(worst, difference)
            require(difference <= tolerance, f"in blocks of {block}, {owner} '{name}' differs by {difference:.1e}")
    return worst, other


def _params(trace: RunTrace) -> Tensors:
    return {f"params/{name}": value for name, value in trace.params.items()}


def _same(one: RunTrace, two: RunTrace) -> bool:
    states = all(tensors.equal(one.states[client], two.states[client]) for client in one.states)
    return states and tensors.equal(one.params, two.params)


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
