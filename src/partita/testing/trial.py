"""A method on a small federation: the runs that several promises share, and how two of them are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch

from partita.core import tensors
from partita.core.data import Population
from partita.core.method import Method
from partita.core.model import Model
from partita.core.optim import SGD, AdamW, Optimizer
from partita.core.rng import Key
from partita.core.rounds import Listener, RoundResult, initial_server, rounds
from partita.core.server_rule import Server
from partita.core.settings import FederationSettings, Run, Training
from partita.core.tensors import Tensors
from partita.engines.availability import Availability
from partita.engines.simulation import SimulationEngine
from partita.storage import checkpoint
from partita.storage.client_store import ClientStore, DiskStore, MemoryStore
from partita.storage.initial_values import InitialValues
from partita.testing import probes
from partita.testing.promises import NotTested, require
from partita.testing.toy import Float64Model, Float64Population, PooledPopulation

ROUNDS = 6


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
        asked = FederationSettings(cohort=1 if method.pool else 0.5)
        # One run with drift is enough: the baseline. It takes a tenth of the time and changes no result.
        self.run = Run(method, training, rounds=ROUNDS, key=Key(7), federation=asked, drift=False)
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
            probe = probes.RoundProbe(self.run, self.model, found)
            trace, error = run_rounds(run, self.model, engine, [probe]), None
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
        return run_rounds(self.run, self.model, self.make(wire=True))

    @cached_property
    def block_difference(self) -> float:
        """The largest difference between blocks and single clients with SGD in float32."""
        candidates: tuple[Optimizer, ...] = (SGD(momentum=0.9), AdamW(eps=0.1), self.run.training.steps_by)
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
        check_resume(self.run, self.wide_model, self.wide_make, self.wide_blocks, ROUNDS // 2, "memory", self._block(5))

    def _block(self, most: int) -> int:
        return min(most, self.run.cohort_size(len(self.population.clients)))


def faults(run: Run, clients: Sequence[str]) -> Availability:
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
        return SimulationEngine(run, model, population, availability=faults(run, population.clients), **options)  # type: ignore[arg-type]

    return make


def run_rounds(
    run: Run,
    model: Model,
    engine: SimulationEngine,
    listeners: Sequence[Listener] = (),
    server: Server | None = None,
    start: int = 0,
) -> RunTrace:
    """Return what a run gives, from round `start` on."""
    results = list(rounds(run, model, engine, server, start, listeners=listeners))
    return RunTrace(results, states_of(run, engine))


def states_of(run: Run, engine: SimulationEngine) -> dict[str, Tensors]:
    """Return every client's state after the run, keyed by "slot/name"."""
    states = {}
    for client in engine.clients():
        state = engine.store.load(client, run.rounds)
        slots = {"personal": state.personal, **state.memory}
        states[client] = {f"{slot}/{name}": value for slot, part in slots.items() for name, value in part.items()}
    return states


def check_resume(
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
        again = run_rounds(run, model, make(store=DiskStore(disk.folder), block=block), server=server, start=done)
    require(same_result(baseline, again), f"resumed after round {stop - 1} with state in {kind}, the result differs")
    late = [result.traffic for result in baseline.rounds[stop:]]
    require(late == [result.traffic for result in again.rounds], f"resumed after round {stop - 1}, bytes differ")


def _compare_blocks(run: Run, model: Model, make: Maker, block: int, tolerance: float) -> tuple[float, RunTrace]:
    """Compare a run in blocks with one of single clients; return the largest difference, and the run in blocks."""
    worst, baseline, other = 0.0, run_rounds(run, model, make()), run_rounds(run, model, make(block=block))
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


def same_result(one: RunTrace, two: RunTrace) -> bool:
    """Return whether two runs end with the same model and the same states, bit for bit."""
    states = all(tensors.equal(one.states[client], two.states[client]) for client in one.states)
    return states and tensors.equal(one.params, two.params)
