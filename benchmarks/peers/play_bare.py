"""A bare PyTorch loop, in one process or shared out by hand among several: play_bare.py WORK FINAL [PROCESSES]."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from work import LR, WEIGHT_DECAY, Part, Told, Work, load, started

HELD: dict[str, Any] = {}  # what forks inherit


def main() -> None:
    told, path, final = Told(), sys.argv[1], sys.argv[2]
    processes = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    work = load(path)
    module, mean = started(work), work.start
    if processes == 1:
        told.ready()
        for number in range(work.rounds):
            told.wait()
            mean = play(module, mean, work, work.parts, number)
            told.round()
    else:
        HELD.update(module=module, work=work, processes=processes)
        with ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), one_thread) as pool:
            told.ready(threads=f"{processes} x 1")
            for number in range(work.rounds):
                told.wait()
                halves = list(pool.map(share, range(processes), [number] * processes, [mean] * processes))
                mean = {name: sum(half[name] for half in halves) for name in mean}  # type: ignore[misc]
                told.round()
            told.done(mean, final)
        return
    told.done(mean, final)


def play(module: Any, start: dict[str, Tensor], work: Work, parts: Sequence[Part], number: int) -> dict[str, Tensor]:
    """What one would write by hand: load, train with torch.optim, add to the weighted mean."""
    mean = {name: torch.zeros_like(value) for name, value in start.items()}
    for part in parts:
        module.load_state_dict(start)
        optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
        for indices in part.batches[number]:
            loss = functional.cross_entropy(module(part.images[indices]).logits, part.labels[indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for name, value in module.named_parameters():
                mean[name] += value * (len(part.labels) / work.total)
    return mean


def one_thread() -> None:
    torch.set_num_threads(1)


def share(place: int, number: int, start: dict[str, Tensor]) -> dict[str, Tensor]:
    return play(HELD["module"], start, HELD["work"], HELD["work"].parts[place :: HELD["processes"]], number)


if __name__ == "__main__":
    main()
