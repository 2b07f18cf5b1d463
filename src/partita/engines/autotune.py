"""How to compute, where the user leaves it open: clients side by side, recorded or not, and whose kernels."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from partita.core import memory
from partita.core.client import ClientState, begin_round
from partita.core.data import Population
from partita.core.model import Model
from partita.core.plan import RoundInfo, plan_for
from partita.core.rounds import initial_server, make_job
from partita.core.settings import Run, RunError
from partita.training.cuda_graphs import CudaRecorder, GraphCache
from partita.training.local_training import train_clients

SMALL_STEP_FLOPS = (
    3e8  # operations a step, below which the calls cost more than the arithmetic (measured on two cores of Arm)
)
MEMORY_RESERVE = 0.5  # of the free memory is left: clients' batches differ, and evaluation needs room too


def choose_block(
    run: Run, model: Model, population: Population, device: torch.device, graphs: bool = False, workers: int = 1
) -> int:
    """On a CPU, all clients of a small model, whose cost is the calls and not the arithmetic, and one of a larger. On a
    GPU, as many as fit its memory by a trial of one; recordings take as much once more. Of all, a worker has its share.
    """
    most = -(-run.cohort_size(len(population.clients)) // workers)
    if device.type == "cpu":
        return most if _operations(run, model, population) <= SMALL_STEP_FLOPS else 1
    model.to(device)
    step = replace(run, training=replace(run.training, steps=1))
    client = population.clients[0]
    job, _ = make_job(step, model, initial_server(step, model), 0, client)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    train_clients(step, [begin_round(step, model, job, ClientState(), population[client].train)])
    taken = torch.cuda.max_memory_allocated(device) - before
    free, _ = torch.cuda.mem_get_info(device)
    if workers > 1:  # each will hold, beside this process, the model and the data too
        free = free // -(-workers // torch.cuda.device_count()) - before
    return max(1, min(most, int(free * (1 - MEMORY_RESERVE) / max(1, taken * (1 + graphs)))))


def _operations(run: Run, model: Model, population: Population) -> float:
    """Of one step, by a look at one example: a backward pass costs as much as two forward."""
    examples = next((each for client in population.clients if len(each := population[client].train)), None)
    if examples is None:
        raise RunError("no client has examples to train on here; with split.name = 'site', name one in split.client")
    batch = examples.take(torch.zeros(1, dtype=torch.long))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(model.initial, batch.inputs)
    return 3.0 * run.training.batch_size * counter.get_total_flops()


def check_block(run: Run, model: Model, clients: Sequence[str], block: int) -> None:
    """Refuse a block that does not fit into memory: each client has weights, gradients and up to two moments."""
    together = min(block, run.cohort_size(len(clients)))
    trained = plan_for(run.method.plan, model, RoundInfo(0, run.rounds, clients[0])).train
    numbers = sum(model.initial[name].numel() for name in trained)
    words = f"training {together} clients side by side" if together > 1 else "training one client"
    memory.require(16 * numbers * together, words, "lower engine.clients_per_block, or choose a smaller model")


def choose_graphs(wanted: bool | Literal["auto"], compile: bool, device: torch.device) -> GraphCache | None:
    """On a GPU unless told otherwise. Where "auto" meets what cannot be recorded, it says so and goes on without."""
    if wanted is True and device.type == "cpu":
        raise RunError("engine.cuda_graphs is for GPUs, and this run is on a CPU; leave it at 'auto'")
    recorder = CudaRecorder() if wanted and device.type == "cuda" else None
    return GraphCache(recorder, strict=wanted is True, compile=compile) if recorder or compile else None


def bf16_slowdown() -> float:
    """How many times as long as in float32 a product of matrices takes this CPU in bfloat16: many have no arithmetic
    for it, and are slower by hundreds.
    """
    times = []
    for kind in (torch.float32, torch.bfloat16):
        square = torch.ones(96, 96, dtype=kind)
        times.append(min(_seconds(square) for _ in range(3)))
    return times[1] / times[0]


def _seconds(square: torch.Tensor) -> float:
    begun = time.perf_counter()
    square @ square
    return time.perf_counter() - begun


def configure_backends(onednn: bool | Literal["auto"]) -> bool:
    """Say for this process whose kernels torch takes, and hand back whether oneDNN's are among them.

    "auto" leaves these on but where they are slow: on Arm, built without Arm's Compute Library, they run plain
    reference code (a small linear layer takes 8 times as long). cuDNN's attention plans each new shape anew, and
    batches of text come in many, so it is off.
    """
    if onednn == "auto":
        onednn = not (platform.machine() in ("aarch64", "arm64") and "ACL" not in torch.__config__.show())
    torch.backends.mkldnn.enabled = onednn  # type: ignore[assignment]
    torch.backends.cuda.enable_cudnn_sdp(False)
    return onednn
