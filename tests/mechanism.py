"""Checks of example- and group-level privacy: replay a few private steps of a run with the training code.

Every client round is prepared by `begin_round` and trained by `train_clients`. Two parts are replaced: the optimizer
records gradients without changing parameters, and the reference replay has zero noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from evidence import (
    Array,
    Check,
    chance_of_cosine,
    check_counts,
    check_deviation,
    check_dispersion,
    check_normality,
)
from numpy.typing import NDArray

from partita.core.batch_schedule import BatchSchedule
from partita.core.client import ClientRound, ClientState, begin_round
from partita.core.data import Population
from partita.core.dp_settings import PrivacySettings
from partita.core.model import Model
from partita.core.rounds import make_job
from partita.core.server_rule import Server
from partita.core.settings import Run
from partita.core.tensors import Slots, Tensors
from partita.training.local_training import group_key, train_clients
from partita.training.phase_trainer import PhaseTrainer
from partita.training.phase_work import PhaseWork

T = TypeVar("T")
CLIENTS = 4  # clients to replay
STEPS = 4  # steps of each phase to replay
INSPECTED_ROUNDS = 64  # client rounds whose batches are inspected without training
PREFIX = 4096  # elements of a tensor that are compared with those of other steps
LARGE_FACTOR = 1e6  # factor on losses and scores that puts every example far above the clip
OVER = 1.01  # maximum contribution of one example to a sum, in multiples of the clip, with rounding


@dataclass
class GradientRecorder:
    """Optimizer that records gradients by block and does not change parameters."""

    name: str
    uses_step_count: bool = False
    blocks: list[tuple[list[str], list[Tensors]]] = field(default_factory=list)  # (clients by row, gradients by step)

    def init(self, params: Tensors) -> dict[str, Tensors]:
        return {}

    def without_weight_decay(self) -> GradientRecorder:
        return self

    def step(self, params: Tensors, grads: Tensors, state: Slots, lr: float, step_counts: Mapping[str, int]) -> None:
        self.blocks[-1][1].append({name: value.detach().cpu() for name, value in grads.items()})

    def capturable_step(
        self, params: Tensors, grads: Tensors, state: Slots, lr: torch.Tensor, step_counts: Tensors
    ) -> None:
        raise NotImplementedError("an audit replays steps without CUDA graphs")

    def block(self, work: PhaseWork) -> PhaseTrainer:
        """Start a block of clients and return its trainer."""
        self.blocks.append(([context.round_info.client for context in work.contexts], []))
        return PhaseTrainer(work)

    def gradients(self) -> dict[tuple[str, int, int], Tensors]:
        """Return the gradients by (client, phase, step)."""
        gradients: dict[tuple[str, int, int], Tensors] = {}
        for phase, (clients, steps) in enumerate(self.blocks):
            for step, grads in enumerate(steps):
                training = clients[: len(next(iter(grads.values())))] if len(clients) > 1 else clients
                for row, client in enumerate(training):
                    own = {name: value[row] if len(clients) > 1 else value for name, value in grads.items()}
                    gradients[client, phase, step] = own
        return gradients


@dataclass(frozen=True)
class Stream:
    """The noise of one step, in units of the charged standard deviation."""

    client: str  # the client, or "server" for the noise on a sum of updates
    round: int
    step: tuple[int, int]  # phase, step
    noise: dict[str, Array]  # the first PREFIX elements of each tensor
    squares: dict[str, tuple[float, int]]  # (sum of squares, count) of each whole tensor


def check_examples(run: Run, model: Model, population: Population, server: Server, block: int = 1) -> list[Check]:
    """Check the noise, clipping and sampling of a run with example-level or group-level privacy against its settings.

    Args:
        run: The run.
        model: The model.
        population: The clients' data.
        server: The state that the replayed rounds start from.
        block: Number of clients trained together, as in the engine.
    """
    private = run.method.privacy
    assert private is not None
    clients = _spread(population)
    rounds = sorted({0, min(1, run.rounds - 1), run.rounds - 1})
    client_rounds = {
        number: [_begin_client_round(run, model, population, server, number, client) for client in clients]
        for number in rounds
    }
    short = [
        _grouped(run, [_shortened(client_round) for client_round in client_rounds[number]], block) for number in rounds
    ]
    checks = _check_clip(run, private, [group for groups in short for group in groups])
    if private.known_noise:
        streams = [stream for groups in short for group in groups for stream in _streams(run, private, group)]
        checks += check_noise(streams, private.known_noise) if streams else []  # a plan may train nothing
    if private.sampling == "poisson":
        replicas = [
            _begin_client_round(run, model, population, server, *replica) for replica in _replicas(run, clients)
        ]
        checks += _check_sampling(run, replicas, len(clients), "groups" if private.group else "examples")
    return checks


def _spread(population: Population) -> list[str]:
    """Choose clients with examples, spread from the smallest to the largest."""
    sizes = {client: len(population[client].train) for client in population.clients}
    ranked = sorted((client for client in sizes if sizes[client]), key=lambda client: sizes[client])
    places = np.linspace(0, len(ranked) - 1, min(CLIENTS, len(ranked))).round().astype(int)
    return [ranked[place] for place in places]


def _begin_client_round(
    run: Run, model: Model, population: Population, server: Server, number: int, client: str, name: str = ""
) -> ClientRound:
    """Prepare a client's round. A `name` makes it a different client with the same examples and its own draws."""
    job, _ = make_job(run, model, server, number, client)
    job = replace(job, client=name or client)
    return begin_round(run, model, job, ClientState(), population[client].train)


def _replicas(run: Run, clients: Sequence[str]) -> list[tuple[int, str, str]]:
    """Return (round, client, name) of `INSPECTED_ROUNDS` client rounds, with extra names if the run has too few."""
    client_rounds = [(number, client) for number in range(run.rounds) for client in clients]
    repeats = -(-INSPECTED_ROUNDS // len(client_rounds))
    every = [
        (number, client, f"{client} {copy}" if copy else "")
        for copy in range(repeats)
        for number, client in client_rounds
    ]
    return every[:INSPECTED_ROUNDS]


def _shortened(client_round: ClientRound) -> ClientRound:
    schedules = [
        BatchSchedule(schedule.order[: sum(schedule.sizes[:STEPS])], schedule.sizes[:STEPS])
        for schedule in client_round.schedules
    ]
    return replace(client_round, schedules=tuple(schedules))


def _grouped(run: Run, client_rounds: Sequence[ClientRound], block: int) -> list[list[ClientRound]]:
    """Group client rounds into blocks as an engine does."""
    groups: dict[object, list[ClientRound]] = {}
    for place, client_round in enumerate(client_rounds):
        groups.setdefault((place // block, group_key(run, client_round)), []).append(client_round)
    return list(groups.values())


def _replay(run: Run, client_rounds: Sequence[ClientRound]) -> dict[tuple[str, int, int], Tensors]:
    recorder = GradientRecorder(run.training.steps_by.name)
    # One group of parameters, so that each step records all gradients at once.
    training = replace(
        run.training,
        optimizer=recorder,
        weight_decay=None,
        momentum=0.0,
        nesterov=False,
        layer_decay=1.0,
        decay_norms_and_biases=True,
    )
    train_clients(replace(run, training=training), client_rounds, recorder.block)
    return recorder.gradients()


def _without_noise(private: PrivacySettings, client_rounds: Sequence[ClientRound]) -> list[ClientRound]:
    return [replace(client_round, dp_settings=replace(private, noise=0.0)) for client_round in client_rounds]


def _sizes(run: Run, client_rounds: Sequence[ClientRound]) -> dict[str, int]:
    """Return the batch size, as charged, by which each client's sum is divided."""
    return {
        client_round.job.client: min(run.training.batch_size, len(client_round.examples))
        for client_round in client_rounds
    }


def _streams(run: Run, private: PrivacySettings, client_rounds: Sequence[ClientRound]) -> list[Stream]:
    noisy, clean = _replay(run, client_rounds), _replay(run, _without_noise(private, client_rounds))
    sizes, number = _sizes(run, client_rounds), client_rounds[0].job.round
    streams = []
    for (client, phase, step), grads in noisy.items():
        unit = sizes[client] / (private.known_noise * private.clip)
        own = clean[client, phase, step]
        drawn = {name: (value.double() - own[name].double()) * unit for name, value in grads.items()}
        streams.append(stream_of(client, number, (phase, step), drawn))
    return streams


def stream_of(client: str, number: int, step: tuple[int, int], noise: Tensors) -> Stream:
    """Summarize the noise of one `step`, (phase, step), of `client` in round `number`."""
    squares = {name: (float(value.square().sum()), value.numel()) for name, value in noise.items()}
    prefixes = {name: np.asarray(value.flatten()[:PREFIX].cpu().numpy()) for name, value in noise.items()}
    return Stream(client, number, step, prefixes, squares)


def check_noise(streams: Sequence[Stream], charged: float) -> list[Check]:
    """Check the deviation per tensor, normality, and independence of steps, rounds, clients and tensors.

    Args:
        streams: Noise in units of the charged standard deviation.
        charged: The charged noise multiplier.
    """
    squares: dict[str, tuple[float, int]] = {}
    for stream in streams:
        for name, (square, count) in stream.squares.items():
            before = squares.get(name, (0.0, 0))
            squares[name] = before[0] + square, before[1] + count
    numbers = np.concatenate([value for stream in streams for value in stream.noise.values()])
    return [
        check_deviation("noise multiplier", charged, squares),
        check_normality("noise: distance from a normal distribution", numbers),
        *_check_streams(streams),
        *_check_tensors(streams),
    ]


def _check_streams(streams: Sequence[Stream]) -> list[Check]:
    """Check the cosines between the noise of two steps, over all common tensors and in each of them."""
    count = len(streams)
    dots, own = np.zeros((count, count)), np.zeros((count, count))
    lengths = np.zeros((count, count), np.int64)
    chances = []  # (stream, stream) of each tensor
    for name in sorted({name for stream in streams for name in stream.noise}):
        here = [place for place, stream in enumerate(streams) if name in stream.noise]
        table = np.stack([streams[place].noise[name] for place in here])
        at = np.ix_(here, here)
        product, square = table @ table.T, np.sum(table**2, 1)[:, None]
        chance = np.ones((count, count))
        chance[at] = _chances(product, square, np.full(product.shape, table.shape[1]))
        chances.append(chance)
        dots[at] += product
        own[at] += square
        lengths[at] += table.shape[1]
    chances.append(_chances(dots, own, lengths))
    lowest = np.minimum.reduce(chances)
    cosines = np.abs(_cosines(dots, own))
    checks = []
    for what in ("steps", "rounds", "clients"):
        pairs = [(a, b) for a in range(count) for b in range(a) if _differ(streams[a], streams[b]) == what]
        if pairs := [pair for pair in pairs if lengths[pair] > 1]:
            rows, columns = zip(*pairs, strict=True)
            p_value = float(lowest[rows, columns].min()) * len(pairs) * len(chances)
            largest = float(cosines[rows, columns].max())
            name = f"noise: largest correlation between {what}"
            checks.append(Check(name, 0.0, largest, min(1.0, p_value), len(pairs)))
    return checks


def _differ(one: Stream, two: Stream) -> str:
    if one.client != two.client:
        return "clients"
    return "rounds" if one.round != two.round else "steps"


def _check_tensors(streams: Sequence[Stream]) -> list[Check]:
    """Check the cosines between tensors of one step, compared element by element from the start."""
    names = sorted({name for stream in streams for name in stream.noise})
    if len(names) < 2:
        return []
    dots, own = np.zeros((len(names),) * 2), np.zeros((len(names),) * 2)
    lengths = np.zeros((len(names),) * 2, np.int64)
    for stream in streams:
        here = [place for place, name in enumerate(names) if name in stream.noise]
        sizes = np.array([len(stream.noise[names[place]]) for place in here])
        table = np.zeros((len(here), sizes.max()))
        for row, place in zip(table, here, strict=True):
            row[: len(stream.noise[names[place]])] = stream.noise[names[place]]
        at, filled = np.ix_(here, here), (np.arange(sizes.max()) < sizes[:, None]).astype(float)
        dots[at] += table @ table.T
        own[at] += table**2 @ filled.T
        lengths[at] += np.minimum(sizes[:, None], sizes)
    rows, columns = np.triu_indices(len(names), 1)
    chance = float(_chances(dots, own, lengths)[rows, columns].min()) * len(rows)
    largest = float(np.abs(_cosines(dots, own))[rows, columns].max())
    what = "noise: largest correlation between tensors"
    return [Check(what, 0.0, largest, min(1.0, chance), len(rows))]


def _cosines(dots: Array, own: Array) -> Array:
    return np.asarray(dots / np.sqrt(np.maximum(own * own.T, 1e-300)))


def _chances(dots: Array, own: Array, lengths: NDArray[np.int64]) -> Array:
    return chance_of_cosine(_cosines(dots, own), lengths)


def altered(model: Model, **methods: Callable[..., Any]) -> Model:
    """Return a copy of a model with some methods replaced."""
    other = copy(model)
    for name, method in methods.items():
        object.__setattr__(other, name, method)  # works for frozen dataclasses too
    return other


def _check_clip(run: Run, private: PrivacySettings, groups: Sequence[Sequence[ClientRound]]) -> list[Check]:
    """Check how far one unit moves a sum: batches with and without their first unit, with a scaled-up loss."""
    largest, tried = 0.0, 0
    for group in groups:
        plain = group[0].ctx.model.losses
        scaled_model = altered(
            group[0].ctx.model, losses=lambda out, targets, plain=plain: LARGE_FACTOR * plain(out, targets)
        )
        scaled = [
            replace(client_round, ctx=replace(client_round.ctx, model=scaled_model))
            for client_round in _without_noise(private, group)
        ]
        shortened = [
            replace(client_round, schedules=tuple(_without_first(schedule) for schedule in client_round.schedules))
            for client_round in scaled
        ]
        sizes, with_first, without_first = _sizes(run, group), _replay(run, scaled), _replay(run, shortened)
        for where, grads in with_first.items():
            moved = sum(
                float((value.double() - without_first[where][name]).square().sum()) for name, value in grads.items()
            )
            largest = max(largest, moved**0.5 * sizes[where[0]] / private.clip)
            tried += 1
    what = f"largest contribution of one {'group' if private.group else 'example'} / clip"
    return [Check(what, 1.0, largest, float(largest <= OVER), tried)]


def _without_first(schedule: BatchSchedule) -> BatchSchedule:
    """Return the same batches, each without its first example."""
    batches = [indices[1:] for indices in schedule]
    return BatchSchedule(torch.cat(batches), tuple(map(len, batches)))


def _check_sampling(
    run: Run, client_rounds: Sequence[ClientRound], clients: int, units: str = "examples"
) -> list[Check]:
    """Check that each unit is sampled independently in each step with the charged probability.

    The client rounds cycle through `clients` clients. Overlaps are counted on disjoint pairs of batches, so that their
    sum is binomial.
    """
    drawn = [_drawn(run, client_round) for client_round in client_rounds]
    every = [batch for batches in drawn for batch in batches]
    if not every:
        return []
    rates: dict[float, tuple[int, int]] = {}
    for places, count, share in every:
        _add(rates, share, len(places), count)
    checks = [check_counts("sampling rate", rates)]
    chance = [(len(places), count, share) for places, count, share in every if share < 1]
    if chance:
        sizes, counts, shares = (np.array(column) for column in zip(*chance, strict=True))
        checks.append(check_dispersion(sizes, counts, shares))
    steps = [pair for batches in drawn for pair in _pairs(batches)]
    rounds = [two for place in range(clients) for two in _pairs(drawn[place::clients])]
    checks += _check_overlap("steps", steps, units)
    checks += _check_overlap("rounds", [pair for two in rounds for pair in zip(*two, strict=False)], units)
    others = _pairs(drawn) if clients > 1 else []
    return checks + _check_overlap("clients", [pair for two in others for pair in zip(*two, strict=False)], units)


def _pairs(items: Sequence[T]) -> list[tuple[T, T]]:
    """Return disjoint pairs of neighbors."""
    return list(zip(items[::2], items[1::2], strict=False))


Drawn = tuple[set[int], int, float]  # indices of a batch, number of units, sampling probability


def _drawn(run: Run, client_round: ClientRound) -> list[Drawn]:
    count = len(client_round.examples)
    share = min(1.0, run.training.batch_size / count)
    return [(set(batch.tolist()), count, share) for schedule in client_round.schedules for batch in schedule]


def _check_overlap(what: str, pairs: Sequence[tuple[Drawn, Drawn]], units: str = "examples") -> list[Check]:
    common: dict[float, tuple[int, int]] = {}
    for (one, count, share), (two, other, chance) in pairs:
        if share * chance < 1:
            both = min(count, other)
            _add(common, share * chance, sum(place < both for place in one & two), both)
    return [check_counts(f"{units} in common between batches of two {what}", common)] if common else []


def _add(groups: dict[float, tuple[int, int]], share: float, count: int, trials: int) -> None:
    before = groups.get(share, (0, 0))
    groups[share] = before[0] + count, before[1] + trials
