"""How to compute, where the user leaves it open: clients side by side, recorded or not, and whose kernels."""

from __future__ import annotations

import platform
from dataclasses import replace
from typing import Literal

import torch

from partita.core.graphs import Graphs
from partita.core.learn import ClientState, learn, visit
from partita.core.model import Model, Population
from partita.core.rounds import ask, begin
from partita.core.run import Run, RunError

SMALL = 100_000  # parameters
SPARE = 0.5  # of the free memory is left: clients' batches differ, and evaluation needs room too


def choose_block(
    run: Run, model: Model, population: Population, device: torch.device, graphs: bool = False, workers: int = 1
) -> int:
    """On a CPU, all clients of a small model, whose cost is the calls and not the arithmetic, shared out among workers,
    and one of a larger. On a GPU, as many as fit its memory by a trial of one; recordings take as much once more.
    """
    cohort = run.cohort_size(len(population.clients))
    if device.type == "cpu":
        return -(-cohort // workers) if sum(value.numel() for value in model.initial.values()) <= SMALL else 1
    model.to(device)
    step = replace(run, training=replace(run.training, steps=1))
    client = population.clients[0]
    job, _ = ask(step, model, begin(step, model), 0, client)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    learn(step, [visit(step, model, job, ClientState(), population[client].train)])
    taken = torch.cuda.max_memory_allocated(device) - before
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(cohort, int(free * (1 - SPARE) / max(1, taken * (1 + graphs)))))


def choose_graphs(wanted: bool | Literal["auto"], device: torch.device) -> Graphs | None:
    """On a GPU unless told otherwise. Where "auto" meets what cannot be recorded, it says so and goes on without."""
    if device.type == "cpu":
        if wanted is True:
            raise RunError("engine.graphs is for GPUs, and this run is on a CPU; leave it at 'auto'")
        return None
    return Graphs(strict=wanted is True) if wanted else None


def use_onednn(wanted: bool | Literal["auto"]) -> bool:
    """Switch torch's oneDNN kernels on or off for this process. "auto" leaves them on but where they are slow: on Arm,
    built without Arm's Compute Library, they run plain reference code (a small linear layer takes 8 times as long).
    """
    if wanted == "auto":
        wanted = not (platform.machine() in ("aarch64", "arm64") and "ACL" not in torch.__config__.show())
    torch.backends.mkldnn.enabled = wanted  # type: ignore[assignment]
    return wanted
