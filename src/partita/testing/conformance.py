"""`check_method`: tests a method against the requirements for every method, by short runs on a toy federation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch

from partita.core import serialization, tensors
from partita.core.client import ClientState, Job, client_params
from partita.core.data import Examples, Population
from partita.core.method import ClientRule, Method, Server, ServerRule, UpdateTransform
from partita.core.model import Model
from partita.core.optim import SGD, AdamW, Optimizer
from partita.core.plan import RoundInfo
from partita.core.rng import Key
from partita.core.rounds import ClientFailure, Engine, RoundResult, initial_server, make_job, rounds
from partita.core.settings import Run, Training
from partita.core.tensors import Slots, Tensors
from partita.core.update import Aggregate, Update
from partita.engines.availability import Availability
from partita.engines.dry_run import DryRunEngine
from partita.engines.simulation import SimulationEngine
from partita.storage import checkpoint
from partita.storage.client_store import DiskStore, MemoryStore
from partita.storage.initial_values import InitialValues, flatten
from partita.testing.toy import Float64Model, Float64Population, PooledPopulation, ToyPopulation, ToyTransformer


class ConformanceError(AssertionError):
    """A method violates a requirement."""


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

    Args:
        method: The method.
        model: Default: `ToyTransformer`.
        population: Default: `ToyPopulation`.
        optimizer: Default: AdamW, or SGD if the method does not support AdamW.
        tolerance: Largest relative difference allowed between blocks and single clients.

    Returns:
        The measurements.

    Raises:
        ConformanceError: If the method violates a requirement. The text names the first one.
    """
    model, population = model or ToyTransformer(), population or ToyPopulation()
    model = method.extend(model, Key(5)) if method.extend else model
    own: Optimizer = AdamW(weight_decay=0.1)
    training = Training(
        lr=0.02, optimizer=optimizer or (own if method.supports_optimizer(own.name) else SGD()), batch_size=8
    )
    clients = 1 if method.pool else 0.5
    run = Run(method, training, rounds=6, key=Key(7), cohort=clients)
    if method.pool:
        population = PooledPopulation(population)
    make = _maker(run, model, population)
    _check_plan(run, model, population)
    before = torch.get_rng_state()
    probed = replace(run, method=replace(method, transforms=tuple(map(TransformProbe, method.transforms))))
    baseline = _run_rounds(probed, model, _maker(probed, model, population)(), EngineProbe(run, model))
    run = replace(run, drift=False)  # one run with drift is enough; it takes a tenth of the time and changes no result
    _require(torch.equal(before, torch.get_rng_state()), "it draws from torch's global random state")
    _check_wire(run, model, make, baseline)
    # A dry run cannot predict choices that depend on clients' data or on what the server has seen.
    if (
        all(type(rule).narrow is ClientRule.narrow for rule in method.client_rules)
        and type(method.server_rule).signal is ServerRule.signal
    ):
        _check_dry_run(run, model, population, baseline)
    _check_order(run, model, make, baseline.rounds[0].server)
    _check_resume(run, model, make, baseline, 1, "disk")
    return ConformanceReport(
        _check_blocks(run, model, population, tolerance),
        sum(sum(result.traffic.up.values()) for result in baseline.rounds),
        sum(sum(result.traffic.down.values()) for result in baseline.rounds),
    )


@dataclass(frozen=True)
class RunTrace:
    """The results of all rounds of a run, and the clients' states after it."""

    rounds: list[RoundResult]
    states: dict[str, Tensors]  # client -> its state, keyed by "slot/name"

    @property
    def params(self) -> Tensors:
        """The global model after the last round."""
        return self.rounds[-1].server.params


Maker = Callable[..., SimulationEngine]


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
    probe: EngineProbe | None = None,
    server: Server | None = None,
    start: int = 0,
) -> RunTrace:
    probed_engine: Engine = probe.over(engine) if probe else engine
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


class TransformProbe(UpdateTransform):
    """Wraps a transform and checks that `encode` is pure. Purity is hard to see in the result of a run with memory."""

    def __init__(self, inner: UpdateTransform) -> None:
        self.inner, self.slots, self.hides = inner, inner.slots, inner.hides

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        name = type(self.inner).__name__
        given: tuple[Slots, Slots] = {"delta": dict(update.delta), **update.slots}, memory
        held = [{slot: tensors.clone_all(part) for slot, part in slots.items()} for slots in given]
        sent, remembered = self.inner.encode(update, memory, key)
        for slots, before in zip(given, held, strict=True):
            _require(_equal_slots(slots, before), f"{name}.encode modifies the update or the memory that it is given")
        again, twice = self.inner.encode(update, memory, key)
        same = tensors.equal(sent.delta, again.delta) and _equal_slots(sent.slots, again.slots)
        _require(
            same and _equal_slots(remembered, twice), f"{name}.encode gives two results for the same update and memory"
        )
        stray = remembered.keys() - self.slots
        _require(not stray, f"{name}.encode remembers '{_some(stray)}', which is not in its slots")
        return sent, remembered

    def decode_update(self, update: Update) -> Update:
        return self.inner.decode_update(update)

    def decode_aggregate(self, aggregate: Aggregate, key: Key) -> Aggregate:
        return self.inner.decode_aggregate(aggregate, key)


class EngineProbe:
    """Wraps an engine and checks every job, every update and the server after every round."""

    def __init__(self, run: Run, model: Model) -> None:
        self.run, self.model = run, model
        self.server: Server | None = None
        self.trained: set[str] = set()
        self.before = {f"params/{name}": value for name, value in model.initial.items()}
        self.held = tensors.clone_all(self.before)  # copies of the server's tensors before the round

    def over(self, engine: SimulationEngine) -> EngineProbe:
        """Wrap this engine."""
        self.engine = engine
        return self

    def clients(self) -> Sequence[str]:
        return self.engine.clients()

    def evaluate(self, jobs: Iterable[Job], on: Examples | None = None) -> Iterator[tuple[str, dict[str, float]]]:
        return self.engine.evaluate(jobs, on)

    def train(self, jobs: Iterable[Job]) -> Iterator[Update | ClientFailure]:
        for job in jobs:
            held = {name: value.clone() for name, value in job.params.items()}
            for reply in self.engine.train([job]):
                _require(tensors.equal(held, job.params), "it modifies the tensors it was sent")
                if isinstance(reply, Update):
                    self._inspect(job, reply)
                yield reply

    def _inspect(self, job: Job, update: Update) -> None:
        plan, _ = client_params(self.run, self.model, job, ClientState())
        sent = serialization.unpack(serialization.pack({"delta": update.delta, **update.slots}))
        names = {name for part in sent.values() for name in part}
        _require(not names & plan.keep, f"'{_some(names & plan.keep)}' is kept by the client, but is in its update")
        _require(names <= plan.up, f"'{_some(names - plan.up)}' is in an update, but the plan does not send it up")
        self.trained |= plan.train

    def after(self, result: RoundResult) -> None:
        """Check that the round changed no tensor in place, and did not change or copy parameters that none trained."""
        _require(
            tensors.equal(self.held, self.before),
            f"it modifies the server's tensors in place in round {result.number}, so no client is sent the change",
        )
        self.before = flatten(result.server)
        self.held = tensors.clone_all(self.before)
        before = self.model.initial if self.server is None else self.server.params
        untouched = result.server.params.keys() - self.run.method.server_rule.affected_names(
            self.model, frozenset(self.trained)
        )
        moved = {name for name in untouched if not torch.equal(before[name], result.server.params[name])}
        _require(not moved, f"'{_some(moved)}' changed in round {result.number}, but no client trained it")
        copied = {name for name in untouched if before[name] is not result.server.params[name]}
        _require(
            not copied,
            f"'{_some(copied)}' did not change in round {result.number}, but was copied, so it is sent to all clients",
        )
        self.server, self.trained = result.server, set()


def _check_plan(run: Run, model: Model, population: Population) -> None:
    """Check that the plan is a pure function of the model and the round."""
    for round_info in (
        RoundInfo(round, run.rounds, client) for round in range(run.rounds) for client in population.clients
    ):
        same = run.method.plan(model, round_info) == run.method.plan(model, round_info)
        _require(
            same, f"its plan for {round_info.client} in round {round_info.round} differs from one call to the next"
        )


def _check_wire(run: Run, model: Model, make: Maker, baseline: RunTrace) -> None:
    """Check that the result is the same with serialized messages and clients that hold only what they were sent.

    The result of a second run is then the same, too. Only if it differs, a plain run tells why.
    """
    packed = _run_rounds(run, model, make(wire=True))
    if not _same(baseline, packed):
        _require(
            _same(baseline, _run_rounds(run, model, make())),
            "the same run gives two results, so it depends on outside state",
        )
        raise ConformanceError("its messages are incomplete: with serialized messages the result differs")
    for one, two in zip(baseline.rounds, packed.rounds, strict=True):
        _require(one.traffic == two.traffic, f"bytes differ with serialized messages in round {one.number}")


def _check_dry_run(run: Run, model: Model, population: Population, baseline: RunTrace) -> None:
    dry_run = DryRunEngine(run, model, population.clients, _faults(run, population.clients))
    for one, two in zip(baseline.rounds, rounds(replace(run, drift=False), model, dry_run), strict=True):
        _require(one.traffic == two.traffic, f"the dry run predicts other bytes than were sent in round {one.number}")


def _check_order(run: Run, model: Model, make: Maker, server: Server) -> None:
    """Check that a client's update does not depend on the clients before it."""
    jobs = [make_job(run, model, server, 1, client)[0] for client in make().clients()]
    forward = {reply.client: reply for reply in make().train(jobs)}
    for reply in make().train(reversed(jobs)):
        other = forward[reply.client]
        if isinstance(reply, Update) and isinstance(other, Update):
            _require(
                tensors.equal(reply.delta, other.delta), f"the update of {reply.client} depends on the order of clients"
            )


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
    _require(_same(baseline, again), f"resumed after round {stop - 1} with state in {kind}, the result differs")
    late = [result.traffic for result in baseline.rounds[stop:]]
    _require(late == [result.traffic for result in again.rounds], f"resumed after round {stop - 1}, bytes differ")


def _check_blocks(run: Run, model: Model, population: Population, tolerance: float) -> float:
    """Compare blocks with single clients: with a smooth optimizer in float32, and with the method's own in float64.

    AdamW divides by the gradient's magnitude. Where the gradient is pure rounding error (a key bias, to which softmax
    is invariant), float32 error becomes a full-size step, so any two ways of computing differ. In float64, the error
    falls below AdamW's eps. In float32, SGD is used, or AdamW with a large eps for methods that need AdamW.

    The block sizes differ: of a cohort of three, one comparison has blocks of two and one, the other a single block.
    The run in a single block is also resumed halfway, with state in memory.
    """
    candidates: tuple[Optimizer, ...] = (SGD(momentum=0.9), AdamW(eps=0.1), run.training.optimizer)
    smooth = next(optimizer for optimizer in candidates if run.method.supports_optimizer(optimizer.name))
    single = replace(run, training=replace(run.training, optimizer=smooth))
    cohort = run.cohort_size(len(population.clients))
    worst, _ = _compare_blocks(single, model, _maker(single, model, population), min(2, cohort), tolerance)
    wide, block = Float64Model(model), min(5, cohort)
    make = _maker(run, wide, Float64Population(population))
    _, together = _compare_blocks(run, wide, make, block, tolerance)
    _check_resume(run, wide, make, together, run.rounds // 2, "memory", block)
    return worst


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
            _require(difference <= tolerance, f"in blocks of {block}, {owner} '{name}' differs by {difference:.1e}")
    return worst, other


def _params(trace: RunTrace) -> Tensors:
    return {f"params/{name}": value for name, value in trace.params.items()}


def _same(one: RunTrace, two: RunTrace) -> bool:
    states = all(tensors.equal(one.states[client], two.states[client]) for client in one.states)
    return states and tensors.equal(one.params, two.params)


def _equal_slots(one: Slots, two: Slots) -> bool:
    return one.keys() == two.keys() and all(tensors.equal(one[slot], two[slot]) for slot in one)


def _some(names: Iterable[str]) -> str:
    return next(iter(sorted(names)), "")


def _require(kept: bool, broken: str) -> None:
    if not kept:
        raise ConformanceError(broken)
