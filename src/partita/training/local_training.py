"""Train one client, or several with equal plans side by side, through all phases of their plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.core import tensors
from partita.core.client import Learned, Visit, _carried
from partita.core.packed import Known, Laid, known
from partita.core.plan import Phase
from partita.core.settings import Run
from partita.training.batching import stage
from partita.training.dp_sgd import Draw
from partita.training.phase_trainer import Block


def learn(run: Run, visits: Sequence[Visit], blocks: Callable[..., Block] = Block) -> list[Learned]:
    """Train one client, or several with equal plans side by side."""
    return launch(run, visits, blocks)()


def launch(run: Run, visits: Sequence[Visit], blocks: Callable[..., Block] = Block) -> Callable[[], list[Learned]]:
    """The same in two parts: a GPU is given all the work, and what is handed back waits for it."""
    phases, private = visits[0].plan.phases, visits[0].private
    trained: list[list[Mapping[str, Tensor]]] = [[] for _ in visits]  # by phase
    deltas: list[list[Mapping[str, Tensor]]] = [[] for _ in visits]
    moments = [_carried(run, each) for each in visits]
    played: list[_Played] = []
    for index, phase in enumerate(phases):
        # Longest first: those still at work are then always a leading slice, and none is computed for nothing.
        order = sorted(range(len(visits)), key=lambda place: -len(visits[place].deals[index]))
        ranked = [visits[place] for place in order]
        contexts = [each.ctx for each in ranked]
        draws = [_draw(run, each, index) for each in ranked] if private else []
        now = [{**visits[place].ctx.anchor, **_joined(trained[place])} for place in order]
        block = blocks(run, phase, contexts, now, [moments[place] for place in order], private, draws)
        deals = [each.deals[index] for each in ranked]
        losses = [block.step(batch) for batch in stage([each.examples for each in ranked], deals, block.device)]
        moved, largest, squares = block.moved()
        for place, params, delta in zip(order, block.params(), moved, strict=True):
            trained[place].append(params)
            deltas[place].append(delta)
        if run.method.carry_optimizer or len(phases) > 1:
            for place, state in zip(order, block.states([len(deal) for deal in deals]), strict=True):
                moments[place] = {slot: {**moments[place].get(slot, {}), **part} for slot, part in state.items()}
        played.append(_Played(order, losses, largest, squares))
    counts = [tuple(map(len, each.deals)) for each in visits]
    steps = {each: _steps(phases, each) for each in {*counts}}

    def wait() -> list[Learned]:
        losses, finite = _fetch(played, len(visits))
        for each, parts in zip(played, zip(*deltas, strict=True), strict=True):  # by phase
            _tell_squares(each, parts)
        return [
            Learned(
                params=_joined(trained[place]),
                steps=steps[counts[place]],
                losses=losses[place],
                optimizer=moments[place],
                delta=known(_joined(deltas[place]), finite),
            )
            for place in range(len(visits))
        ]

    return wait


@dataclass(frozen=True)
class _Played:
    """What a GPU may still be at work on: a phase's losses, and what is to be known of its deltas."""

    order: list[int]  # of clients, as (client,) in the losses
    losses: list[Tensor]  # for each step
    largest: Tensor
    squares: Tensor | None  # (client, name), or (client, 1) of all names together


def _fetch(played: Sequence[_Played], clients: int) -> tuple[list[list[float]], bool]:
    """Each client's losses, and whether all deltas are finite; in one go, since it waits for the GPU."""
    losses: list[list[float]] = [[] for _ in range(clients)]
    parts = [part for each in played for part in (*each.losses, each.largest.unsqueeze(0))]
    fetched = iter(torch.cat(parts).tolist() if parts else [])
    finite = True
    for each in played:
        for step in each.losses:
            for place, loss in zip(each.order[: step.shape[0]], fetched, strict=False):  # the leading clients'
                losses[place].append(loss)
        finite = math.isfinite(next(fetched)) and finite
    return losses, finite


def _tell_squares(played: _Played, deltas: Sequence[Mapping[str, Tensor]]) -> None:
    if played.squares is not None:
        for place, row in zip(played.order, played.squares.tolist(), strict=True):
            delta = deltas[place]
            assert isinstance(delta, Known | Laid)
            delta.square = math.fsum(row)
            if len(row) == len(delta):
                delta.squares = dict(zip(delta, row, strict=True))


def _draw(run: Run, each: Visit, phase: int) -> Draw:
    return Draw(each.key / "noise" / phase, min(run.training.batch_size, len(each.examples)))


def _steps(phases: Sequence[Phase], counts: Sequence[int]) -> dict[str, int]:
    total = Counter[str]()
    for phase, count in zip(phases, counts, strict=True):
        total.update(dict.fromkeys(phase.names, count))
    return total


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """Of what several phases did to a name, the last."""
    if len(parts) == 1:
        return parts[0]
    whole = {name: value for part in parts for name, value in part.items()}
    return tensors.select(whole, whole)


def kind(run: Run, each: Visit) -> Hashable:
    """Clients fit one block if this is equal: model, plan, what they remember, and ages where the optimizer counts."""
    alike = id(each.ctx.model), each.plan
    memory = frozenset((slot, frozenset(part)) for slot, part in each.ctx.memory.items())
    if not run.training.optimizer.ages:
        return alike, memory
    ages = _carried(run, each).get("age", {})
    born = tuple(int(ages[name]) if name in ages else 0 for name in sorted(each.plan.train)) if ages else ()
    # Phases that share a name hand its age on, and that depends on how many steps the earlier one took.
    apart = sum(len(phase.names) for phase in each.plan.phases) == len(each.plan.train)
    return alike, memory, born, None if apart else tuple(len(batches) for batches in each.deals)
