"""Train one client, or several with equal plans side by side, through all phases of their plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.core import tensors
from partita.core.client import ClientRound, LocalResult, carried_optimizer_state
from partita.core.packed import CheckedTensors, PackedTensors, mark_finite
from partita.core.plan import Phase
from partita.core.settings import Run
from partita.training.batching import iterate_batches
from partita.training.dp_sgd import NoiseSource
from partita.training.phase_trainer import PhaseTrainer


def train_clients(
    run: Run, client_rounds: Sequence[ClientRound], make_trainer: Callable[..., PhaseTrainer] = PhaseTrainer
) -> list[LocalResult]:
    """Train one client, or several with equal plans side by side."""
    return start_training(run, client_rounds, make_trainer)()


def start_training(
    run: Run, client_rounds: Sequence[ClientRound], make_trainer: Callable[..., PhaseTrainer] = PhaseTrainer
) -> Callable[[], list[LocalResult]]:
    """The same in two parts: a GPU is given all the work, and what is handed back waits for it."""
    phases, dp_settings = client_rounds[0].plan.phases, client_rounds[0].private
    trained: list[list[Mapping[str, Tensor]]] = [[] for _ in client_rounds]  # by phase
    deltas: list[list[Mapping[str, Tensor]]] = [[] for _ in client_rounds]
    moments = [carried_optimizer_state(run, each) for each in client_rounds]
    pending: list[_PendingPhase] = []
    for index, phase in enumerate(phases):
        # Longest first: those still at work are then always a leading slice, and none is computed for nothing.
        order = sorted(range(len(client_rounds)), key=lambda place: -len(client_rounds[place].schedules[index]))
        ranked = [client_rounds[place] for place in order]
        contexts = [each.ctx for each in ranked]
        noise_sources = [_noise_source(run, each, index) for each in ranked] if dp_settings else []
        start_params = [{**client_rounds[place].ctx.anchor, **_merge_phases(trained[place])} for place in order]
        block = make_trainer(
            run, phase, contexts, start_params, [moments[place] for place in order], dp_settings, noise_sources
        )
        schedules = [each.schedules[index] for each in ranked]
        losses = [
            block.step(batch) for batch in iterate_batches([each.examples for each in ranked], schedules, block.device)
        ]
        moved, largest, squares = block.deltas()
        for place, params, delta in zip(order, block.params(), moved, strict=True):
            trained[place].append(params)
            deltas[place].append(delta)
        if run.method.carry_optimizer or len(phases) > 1:
            for place, state in zip(order, block.states([len(schedule) for schedule in schedules]), strict=True):
                moments[place] = {slot: {**moments[place].get(slot, {}), **part} for slot, part in state.items()}
        pending.append(_PendingPhase(order, losses, largest, squares))
    counts = [tuple(map(len, each.schedules)) for each in client_rounds]
    steps = {each: _steps(phases, each) for each in {*counts}}

    def wait() -> list[LocalResult]:
        losses, finite = _fetch(pending, len(client_rounds))
        for each, parts in zip(pending, zip(*deltas, strict=True), strict=True):  # by phase
            _set_squared_norms(each, parts)
        return [
            LocalResult(
                params=_merge_phases(trained[place]),
                steps=steps[counts[place]],
                losses=losses[place],
                optimizer=moments[place],
                delta=mark_finite(_merge_phases(deltas[place]), finite),
            )
            for place in range(len(client_rounds))
        ]

    return wait


@dataclass(frozen=True)
class _PendingPhase:
    """What a GPU may still be at work on: a phase's losses, and what is to be known of its deltas."""

    order: list[int]  # of clients, as (client,) in the losses
    losses: list[Tensor]  # for each step
    largest: Tensor
    squares: Tensor | None  # (client, name), or (client, 1) of all names together


def _fetch(pending: Sequence[_PendingPhase], clients: int) -> tuple[list[list[float]], bool]:
    """Each client's losses, and whether all deltas are finite; in one go, since it waits for the GPU."""
    losses: list[list[float]] = [[] for _ in range(clients)]
    parts = [part for each in pending for part in (*each.losses, each.largest.unsqueeze(0))]
    fetched = iter(torch.cat(parts).tolist() if parts else [])
    finite = True
    for each in pending:
        for step in each.losses:
            for place, loss in zip(each.order[: step.shape[0]], fetched, strict=False):  # the leading clients'
                losses[place].append(loss)
        finite = math.isfinite(next(fetched)) and finite
    return losses, finite


def _set_squared_norms(pending: _PendingPhase, deltas: Sequence[Mapping[str, Tensor]]) -> None:
    if pending.squares is not None:
        for place, row in zip(pending.order, pending.squares.tolist(), strict=True):
            delta = deltas[place]
            assert isinstance(delta, CheckedTensors | PackedTensors)
            delta.square = tensors.exact_sum(row)
            if len(row) == len(delta):
                delta.squares = dict(zip(delta, row, strict=True))


def _noise_source(run: Run, each: ClientRound, phase: int) -> NoiseSource:
    return NoiseSource(each.key / "noise" / phase, min(run.training.batch_size, len(each.examples)))


def _steps(phases: Sequence[Phase], counts: Sequence[int]) -> dict[str, int]:
    total = Counter[str]()
    for phase, count in zip(phases, counts, strict=True):
        total.update(dict.fromkeys(phase.names, count))
    return total


def _merge_phases(parts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """Of what several phases did to a name, the last."""
    if len(parts) == 1:
        return parts[0]
    whole = {name: value for part in parts for name, value in part.items()}
    return tensors.select(whole, whole)


def group_key(run: Run, each: ClientRound) -> Hashable:
    """Clients fit one block if this is equal: model, plan, what they remember, and ages where the optimizer counts."""
    alike = id(each.ctx.model), each.plan
    memory = frozenset((slot, frozenset(part)) for slot, part in each.ctx.memory.items())
    if not run.training.optimizer.uses_step_count:
        return alike, memory
    step_counts = carried_optimizer_state(run, each).get("age", {})
    initial_steps = (
        tuple(int(step_counts[name]) if name in step_counts else 0 for name in sorted(each.plan.train))
        if step_counts
        else ()
    )
    # Phases that share a name hand its age on, and that depends on how many steps the earlier one took.
    apart = sum(len(phase.names) for phase in each.plan.phases) == len(each.plan.train)
    return alike, memory, initial_steps, None if apart else tuple(len(batches) for batches in each.schedules)
