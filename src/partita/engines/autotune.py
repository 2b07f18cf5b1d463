"""Choices for engine settings left at "auto": block size, CUDA graphs and CPU kernels.

`compile_choice.py` has that for `engine.compile`.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from partita.core import memory, tensors
from partita.core.client import ClientState, begin_round
from partita.core.data import Examples, Population
from partita.core.model import Model
from partita.core.plan import RoundInfo, plan_for
from partita.core.rounds import initial_server, make_job
from partita.core.settings import Run, RunError
from partita.core.torch_private import operations
from partita.training.cuda_capture import CudaRecorder
from partita.training.cuda_graphs import GraphCache
from partita.training.local_training import train_clients

SMALL_STEP_FLOPS = 3e8  # below this many FLOPs per step, call overhead dominates (measured on two Arm cores)
MEMORY_RESERVE = 0.5  # fraction of free memory to leave: clients' batches differ, and evaluation needs memory too


def choose_block(
    run: Run, model: Model, population: Population, device: torch.device, graphs: bool = False, workers: int = 1
) -> int:
    """Choose the number of clients that train together.

    On a CPU: a worker's whole share of the cohort if the model is so small that call overhead dominates, else 1. On a
    GPU: as many clients as fit its memory, estimated from one training step of one client. CUDA graphs double the
    memory. On a server whose clients hold their examples elsewhere: 1, because no client trains there.

    Args:
        run: The run.
        model: The model.
        population: The clients' data.
        device: The device.
        graphs: Whether steps are captured as CUDA graphs.
        workers: Number of worker processes that share the cohort.
    """
    client = first_with_examples(population)
    if client is None:
        return 1
    most = -(-run.cohort_size(len(population.clients)) // workers)
    if device.type == "cpu":
        return most if batch_operations(run, model, population[client].train) <= SMALL_STEP_FLOPS else 1
    model.to(device)
    step = replace(run, training=replace(run.training, steps=1))
    job, _ = make_job(step, model, initial_server(step, model), 0, client)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    train_clients(step, [begin_round(step, model, job, ClientState(), population[client].train)])
    taken = torch.cuda.max_memory_allocated(device) - before
    free, _ = torch.cuda.mem_get_info(device)
    if workers > 1:  # like this process, each worker will hold the model and the data
        free = free // -(-workers // torch.cuda.device_count()) - before
    return max(1, min(most, int(free * (1 - MEMORY_RESERVE) / max(1, taken * (1 + graphs)))))


def first_with_examples(population: Population) -> str | None:
    """Return the first client with training examples on this machine, or None if there is none."""
    return next((client for client in population.clients if len(population[client].train)), None)


def batch_operations(run: Run, model: Model, examples: Examples) -> float:
    """Estimate the FLOPs of one batch from one example. A backward pass costs as much as two forward passes."""
    batch = examples.take(torch.zeros(1, dtype=torch.long))
    device = next(iter(model.initial.values())).device
    with torch.no_grad():
        forward = operations(lambda: model(model.initial, tensors.to(batch.inputs, device)))
    return 3.0 * run.training.batch_size * forward


def check_block(run: Run, model: Model, clients: Sequence[str], block: int) -> None:
    """Raise an error if a block does not fit in memory. Each client needs weights, gradients and up to two moments."""
    together = min(block, run.cohort_size(len(clients)))
    trained = plan_for(run.method.plan, model, RoundInfo(0, run.rounds, clients[0])).train
    numbers = sum(model.initial[name].numel() for name in trained)
    what = f"training {together} clients together" if together > 1 else "training one client"
    memory.require(16 * numbers * together, what, "lower engine.clients_per_block, or choose a smaller model")


def choose_graphs(
    wanted: bool | Literal["auto"], compile: bool, device: torch.device, strict_compile: bool = True
) -> GraphCache | None:
    """Create the cache of CUDA graphs or compiled steps, or return None for eager steps.

    Args:
        wanted: `engine.cuda_graphs`. "auto" uses CUDA graphs on a GPU; if a step cannot be captured, it warns and
            runs eagerly. True raises an error instead.
        compile: Whether to use torch.compile.
        device: The device.
        strict_compile: Whether a failed compilation is an error. Otherwise the cache warns and does not compile.

    Raises:
        RunError: If CUDA graphs are requested on a CPU.
    """
    if wanted is True and device.type == "cpu":
        raise RunError("engine.cuda_graphs is for GPUs, but this run is on a CPU; leave it at 'auto'")
    recorder = CudaRecorder() if wanted and device.type == "cuda" else None
    if not recorder and not compile:
        return None
    return GraphCache(recorder, wanted is True, compile, strict_compile)


def bf16_slowdown() -> float:
    """Measure how many times slower a bfloat16 matrix product is than a float32 one on this CPU.

    Many CPUs have no bfloat16 arithmetic and are hundreds of times slower.
    """
    times = []
    for kind in (torch.float32, torch.bfloat16):
        square = torch.ones(96, 96, dtype=kind)
        times.append(min(_seconds(square) for _ in range(3)))
    return times[1] / times[0]


def _seconds(square: torch.Tensor) -> float:
    start = time.perf_counter()
    square @ square
    return time.perf_counter() - start


def configure_backends(onednn: bool | Literal["auto"]) -> bool:
    """Choose the kernels that torch uses in this process.

    cuDNN attention is always disabled: it builds a plan for each new shape, and text batches come in many shapes.

    Args:
        onednn: Whether to use oneDNN. "auto" disables it where it is slow: on Arm, oneDNN built without Arm's Compute
            Library runs plain reference code (a small linear layer takes 8 times as long).

    Returns:
        Whether oneDNN is enabled.
    """
    if onednn == "auto":
        onednn = not (platform.machine() in ("aarch64", "arm64") and "ACL" not in torch.__config__.show())
    torch.backends.mkldnn.enabled = onednn  # type: ignore[assignment]
    torch.backends.cuda.enable_cudnn_sdp(False)
    return onednn
