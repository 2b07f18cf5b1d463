"""Checks of client-level privacy: replay rounds of the run's own clients through the server code to the noisy sum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from evidence import Check, chance_of_either
from mechanism import OVER, Stream, check_noise, stream_of
from scipy.stats import hypergeom

from partita.core import tensors
from partita.core.client import Job
from partita.core.data import EvaluateOn
from partita.core.model import Model
from partita.core.rounds import ClientFailure, Engine, Reply, rounds
from partita.core.server_rule import Server, ServerRule
from partita.core.settings import Run
from partita.core.tensors import Slots, Tensors
from partita.core.update import Aggregate, Update
from partita.privacy.client_level import ClippedUpdates, OverCohort

ROUNDS = 3  # rounds to replay
SCALE_FACTOR = 10.0  # factor on clipped updates; a larger one could be refused as implausible before it is measured


@dataclass
class UpdateRecorder(ServerRule):
    """Server rule that records the aggregates and does not change the server."""

    aggregates: list[Aggregate] = field(default_factory=list)  # the aggregate of each round

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        self.aggregates.append(aggregate)
        return server


@dataclass
class ScaledUpdatesEngine:
    """Engine wrapper that scales updates far above the clip after clipping. One client may be made to fail."""

    engine: Engine
    failing_client: str = ""  # name of the client that fails; "" for none

    def clients(self) -> Sequence[str]:
        return self.engine.clients()

    def evaluate(self, jobs: Iterable[Job], on: EvaluateOn = None) -> Iterator[tuple[str, dict[str, float]]]:
        return self.engine.evaluate(jobs, on)

    def train(self, jobs: Iterable[Job]) -> Iterator[Reply]:
        for reply in self.engine.train(jobs):
            if not isinstance(reply, Update):
                yield reply
            elif reply.client == self.failing_client:
                yield ClientFailure(reply.client, "left out by the audit")
            else:
                slots = {slot: tensors.scale(part, SCALE_FACTOR) for slot, part in reply.slots.items()}
                yield replace(reply, delta=tensors.scale(reply.delta, SCALE_FACTOR), slots=slots)


def check_clients(
    run: Run, model: Model, engine: Engine, server: Server, cohorts: Sequence[Sequence[str]]
) -> list[Check]:
    """Check the noise, clipping and recorded cohorts of a run with client-level privacy.

    Args:
        run: The run.
        model: The model.
        engine: Trains the run's clients. It gets jobs of the first rounds, all from the same server state.
        server: The state that the replayed rounds start from.
        cohorts: The recorded cohorts by round.
    """
    transform = run.method.transforms[0]
    assert isinstance(transform, ClippedUpdates)
    checks = [_check_clip(run, model, engine, server, transform)]
    if transform.noise:
        streams = _streams(run, model, engine, server, transform)
        checks += check_noise(streams, transform.noise)
    return checks + _check_cohorts(cohorts, len(engine.clients()), transform.cohort)


def _record_aggregates(
    run: Run, model: Model, engine: Engine, server: Server, transform: ClippedUpdates, count: int
) -> list[Slots]:
    """Return the aggregates of the first `count` rounds: delta and slots by name."""
    recorder, rule = UpdateRecorder(), run.method.server_rule
    assert isinstance(rule, OverCohort)
    method = replace(
        run.method, transforms=(transform, *run.method.transforms[1:]), server_rule=replace(rule, inner=recorder)
    )
    federation = replace(run.federation, min_updates=0)
    longer_run = replace(run, method=method, federation=federation, rounds=max(count, run.rounds), drift=False)
    for number, _ in enumerate(rounds(longer_run, model, engine, server), start=1):
        if number == count:
            break
    return [{"delta": aggregate.delta, **aggregate.slots} for aggregate in recorder.aggregates]


def _flat(slots: Mapping[str, Tensors], cohort: int) -> Tensors:
    return {f"{slot}/{name}": value.double() * cohort for slot, part in slots.items() for name, value in part.items()}


def _streams(run: Run, model: Model, engine: Engine, server: Server, transform: ClippedUpdates) -> list[Stream]:
    noiseless = replace(transform, noise=0.0)
    noisy, clean = (
        _record_aggregates(run, model, engine, server, variant, ROUNDS) for variant in (transform, noiseless)
    )
    streams = []
    for number, pair in enumerate(zip(noisy, clean, strict=True)):
        with_noise, without = (_flat(slots, transform.cohort) for slots in pair)
        unit = 1 / (transform.noise * transform.clip)
        drawn = {name: (value - without[name]) * unit for name, value in with_noise.items()}
        streams.append(stream_of("server", number, (0, 0), drawn))
    return streams


def _check_clip(run: Run, model: Model, engine: Engine, server: Server, transform: ClippedUpdates) -> Check:
    """Check how far one client moves the sum if it sends far more than the clip."""
    noiseless = replace(transform, noise=0.0)
    [full] = _record_aggregates(run, model, ScaledUpdatesEngine(engine), server, noiseless, 1)
    largest = 0.0
    tried = _first_cohort(run, engine)[:3]
    for client in tried:
        [rest] = _record_aggregates(run, model, ScaledUpdatesEngine(engine, client), server, noiseless, 1)
        before, after = (_flat(slots, transform.cohort) for slots in (full, rest))
        moved = sum(
            float((value - after[name] if name in after else value).square().sum()) for name, value in before.items()
        )
        largest = max(largest, moved**0.5 / transform.clip)
    return Check("largest contribution of one client / clip", 1.0, largest, float(largest <= OVER), len(tried))


def _first_cohort(run: Run, engine: Engine) -> list[str]:
    return run.draw_cohort(0, engine.clients())


def _check_cohorts(cohorts: Sequence[Sequence[str]], population: int, charged: int) -> list[Check]:
    """Check that the recorded cohorts have the charged size and are drawn independently in each round."""
    sizes = [len(set(cohort)) for cohort in cohorts]
    wrong = [size for size in sizes if size != charged]
    checks = [Check("clients in a cohort", charged, wrong[0] if wrong else charged, float(not wrong), len(sizes))]
    pairs = list(zip(cohorts[::2], cohorts[1::2], strict=False))
    if pairs and charged < population:
        repeated = sum(len(set(one) & set(two)) for one, two in pairs)
        pmf = np.ones(1)
        for _ in pairs:
            pmf = np.convolve(pmf, hypergeom.pmf(np.arange(charged + 1), population, charged, charged))
        chance = chance_of_either(float(pmf[: repeated + 1].sum()), float(pmf[repeated:].sum()))
        expected = charged / population
        share = repeated / len(pairs) / charged
        checks.append(Check("share of a cohort asked again in the next round", expected, share, chance, len(pairs)))
    return checks
