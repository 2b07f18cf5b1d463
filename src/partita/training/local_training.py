"""Trains one client, or a block of clients with equal plans, through all phases of the plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from partita.core import tensors
from partita.core.client import ClientRound, LocalResult
from partita.core.data import Batch
from partita.core.plan import Phase
from partita.core.settings import Run
from partita.core.update import ComputedWork, DeltaFacts
from partita.training.augmentation import augment
from partita.training.batch_shapes import step_shapes
from partita.training.batching import iterate_batches
from partita.training.dp_sgd import NoiseSource
from partita.training.objective import rule_batch
from partita.training.padding_meter import PaddingMeter
from partita.training.phase_trainer import PhaseDeltas, PhaseTrainer
from partita.training.phase_work import PhaseWork

MakeTrainer = Callable[[PhaseWork], PhaseTrainer]


def train_clients(
    run: Run, client_rounds: Sequence[ClientRound], make_trainer: MakeTrainer = PhaseTrainer
) -> list[LocalResult]:
    """Train one client, or a block of clients with equal plans.

    Args:
        run: The settings.
        client_rounds: The clients' rounds. Their `group_key` must be equal.
        make_trainer: Creates the trainer of each phase; `PhaseTrainer` or a `GraphCache`.

    Returns:
        The result of each client, in the order of `client_rounds`.
    """
    return start_training(run, client_rounds, make_trainer)()


def start_training(
    run: Run, client_rounds: Sequence[ClientRound], make_trainer: MakeTrainer = PhaseTrainer
) -> Callable[[], list[LocalResult]]:
    """Queue all work of `train_clients` on the GPU.

    The arguments are those of `train_clients`.

    Returns:
        A function that waits for the results and returns them.
    """
    phases, dp_settings = client_rounds[0].plan.phases, client_rounds[0].dp_settings
    trained: list[list[Mapping[str, torch.Tensor]]] = [[] for _ in client_rounds]  # for each client, by phase
    deltas: list[list[Mapping[str, torch.Tensor]]] = [[] for _ in client_rounds]
    moments = [client_round.optimizer for client_round in client_rounds]
    work_done: list[list[ComputedWork]] = [[] for _ in client_rounds]  # for each client, by phase
    pending: list[_PendingPhase] = []
    for index, phase in enumerate(phases):
        # Clients with the most steps first: the clients that still train are then always a leading slice.
        order = sorted(range(len(client_rounds)), key=lambda place: -len(client_rounds[place].schedules[index]))
        ranked = [client_rounds[place] for place in order]
        work = PhaseWork(
            run,
            phase,
            [client_round.ctx for client_round in ranked],
            [
                {**client_rounds[place].ctx.anchor, **client_rounds[place].start, **_merge_phases(trained[place])}
                for place in order
            ],
            [moments[place] for place in order],
            dp_settings,
            [_noise_source(run, client_round, index) for client_round in ranked] if dp_settings else [],
        )
        trainer = make_trainer(work)
        schedules = [client_round.schedules[index] for client_round in ranked]
        examples = [client_round.examples for client_round in ranked]
        # A block has one model, so all its clients have dropout, or none has.
        drops = run.training.dropout and ranked[0].ctx.model.uses_dropout()
        draws = drops or run.training.augment
        seed_keys = [client_round.key / "dropout" / index for client_round in ranked] if draws else None
        shapes = step_shapes([schedule.sizes for schedule in schedules], trainer.padding)
        meter = PaddingMeter(len(ranked))
        padded = shapes if trainer.padding else None
        batches = iterate_batches(examples, schedules, trainer.device, seed_keys, padded, meter)
        if run.training.augment:
            batches = _augmented(batches, run.training.augment, drops)
        losses = [trainer.step(batch, shape.active) for batch, shape in zip(batches, shapes, strict=True)]
        moved = trainer.deltas()
        for place, done in zip(order, meter.work(), strict=True):
            work_done[place].append(done)
        for place, params, delta in zip(order, trainer.params(), moved.deltas, strict=True):
            trained[place].append(params)
            deltas[place].append(delta)
        if run.method.carry_optimizer or run.method.sets_optimizer_state or len(phases) > 1:
            for place, state in zip(order, trainer.states([len(schedule) for schedule in schedules]), strict=True):
                moments[place] = {slot: {**moments[place].get(slot, {}), **part} for slot, part in state.items()}
        pending.append(_PendingPhase(order, losses, moved))
    counts = [tuple(map(len, client_round.schedules)) for client_round in client_rounds]
    steps = {count: _steps(phases, count) for count in {*counts}}

    def wait() -> list[LocalResult]:
        losses, finite = _fetch(pending, len(client_rounds))
        # A delta merged from several phases is a new object with norms of its own.
        squares = _squares_by_client(pending[0]) if len(pending) == 1 else {}
        return [
            LocalResult(
                params=_merge_phases(trained[place]),
                steps=steps[counts[place]],
                losses=losses[place],
                optimizer=moments[place],
                facts=_facts(_merge_phases(deltas[place]), finite, squares.get(place)),
                work=ComputedWork(
                    sum(done.real for done in work_done[place]), sum(done.computed for done in work_done[place])
                ),
            )
            for place in range(len(client_rounds))
        ]

    return wait


def _augmented(batches: Iterable[Batch], names: Sequence[str], drops: bool) -> Iterator[Batch]:
    """Augment the images of each batch. Only a model with dropout needs the seeds afterwards."""
    for batch in batches:
        changed = augment(batch, names)
        yield changed if drops else rule_batch(changed.inputs, changed.targets, changed.mask)


@dataclass(frozen=True)
class _PendingPhase:
    """Results of a phase that the GPU may still compute."""

    order: list[int]  # indices of the clients, in the order of the losses' client dimension
    losses: list[torch.Tensor]  # (client,) for each step
    moved: PhaseDeltas


def _fetch(pending: Sequence[_PendingPhase], clients: int) -> tuple[list[list[float]], bool]:
    """Each client's losses, and whether all deltas are finite. Synchronizes with the GPU once."""
    losses: list[list[float]] = [[] for _ in range(clients)]
    parts = [part for phase in pending for part in (*phase.losses, phase.moved.largest.unsqueeze(0))]
    fetched = iter(torch.cat(parts).tolist() if parts else [])
    finite = True
    for phase in pending:
        for step in phase.losses:
            for place, loss in zip(phase.order[: step.shape[0]], fetched, strict=False):  # the leading clients
                losses[place].append(loss)
        finite = math.isfinite(next(fetched)) and finite
    return losses, finite


def _squares_by_client(phase: _PendingPhase) -> dict[int, list[float]]:
    """By index of the client, the squared norms of its delta; empty if they were not computed."""
    if phase.moved.squares is None:
        return {}
    return dict(zip(phase.order, phase.moved.squares.tolist(), strict=True))


def _facts(delta: Mapping[str, torch.Tensor], finite: bool, squares: Sequence[float] | None) -> DeltaFacts:
    if squares is None:
        return DeltaFacts(delta, finite)
    by_name = dict(zip(delta, squares, strict=True)) if len(squares) == len(delta) else None
    return DeltaFacts(delta, finite, tensors.exact_sum(squares), by_name)


def _noise_source(run: Run, each: ClientRound, phase: int) -> NoiseSource:
    return NoiseSource(each.key / "noise" / phase, min(run.training.batch_size, len(each.examples)))


def _steps(phases: Sequence[Phase], counts: Sequence[int]) -> dict[str, int]:
    total = Counter[str]()
    for phase, count in zip(phases, counts, strict=True):
        total.update(dict.fromkeys(phase.names, count))
    return total


def _merge_phases(parts: Sequence[Mapping[str, torch.Tensor]]) -> Mapping[str, torch.Tensor]:
    """Merge the results of phases; for a name in several phases, the last."""
    if len(parts) == 1:
        return parts[0]
    whole = {name: value for part in parts for name, value in part.items()}
    return tensors.select(whole, whole)


def group_key(run: Run, each: ClientRound) -> Hashable:
    """Return a key that is equal for clients that can train in one block.

    They need the same model, equal plans, memory with the same slots and names, and equal step counts if the optimizer
    uses them.
    """
    model_and_plan = id(each.ctx.model), each.plan
    memory = frozenset((slot, frozenset(part)) for slot, part in each.ctx.memory.items())
    if not run.training.steps_by.uses_step_count:
        return model_and_plan, memory
    step_counts = each.optimizer.get("age", {})
    initial_steps = (
        tuple(int(step_counts[name]) if name in step_counts else 0 for name in sorted(each.plan.train))
        if step_counts
        else ()
    )
    # If phases share a name, the later phase starts from the step count of the earlier one, so the numbers of steps
    # must be equal too.
    disjoint = sum(len(phase.names) for phase in each.plan.phases) == len(each.plan.train)
    return model_and_plan, memory, initial_steps, None if disjoint else tuple(map(len, each.schedules))
