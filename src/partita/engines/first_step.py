"""The first training step of a run, taken once before its first round to see what the device lacks.

An operation without a bfloat16 kernel, one without a deterministic kernel, and too little memory for a single client
all show there.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from partita.core import memory
from partita.core.client import ClientState, begin_round
from partita.core.data import Population
from partita.core.model import Model
from partita.core.rounds import initial_server, make_job
from partita.core.settings import Run, RunError
from partita.engines.determinism import found_operations, go_on_without, strict_steps
from partita.training.local_training import train_clients

TRIED = re.compile(r"Tried to allocate ([\d.]+ \w+)")
SMALLER = (
    "lower training.batch_size and raise training.accumulate, set model.checkpointing = true, or store frozen weights "
    "in fewer bits with model.quantize"
)


class StepError(RunError):
    """A model cannot take a training step on this device."""


def take_first_step(run: Run, model: Model, population: Population, client: str, clients: int = 1) -> list[str]:
    """Take a training step, and change the model where the device asks for it.

    A part of the model that has no bfloat16 kernel computes in float32 from then on, as autocast lets others do.

    Args:
        run: The run.
        model: The model, on the device.
        population: The clients' data.
        client: The client that takes the step.
        clients: The size of the block that takes it, in which all clients are this one.

    Returns:
        What the user should know, each as a sentence.

    Raises:
        StepError: If the model cannot take the step.
        NotDeterministicError: If an operation has no deterministic kernel, and the run asks for one.
    """
    step = replace(run, training=replace(run.training, steps=1))
    job, _ = make_job(step, model, initial_server(step, model), 0, client)
    examples = population[client].train
    findings: list[str] = []
    with found_operations() as operations:
        while True:
            try:
                with strict_steps(), torch.enable_grad():  # a caller may only want to compute
                    train_clients(
                        step, [begin_round(step, model, job, ClientState(), examples) for _ in range(clients)]
                    )
                break
            except torch.OutOfMemoryError as error:
                if clients > 1:  # the engine halves a block that does not fit
                    break
                raise StepError(f"{out_of_memory(error)} while training {clients_of(clients)}; {SMALLER}") from error
            except (RuntimeError, ValueError) as error:
                findings.append(_mend(error, run, model))
    return findings + operations


def _mend(error: Exception, run: Run, model: Model) -> str:
    """Change what a step failed for, and return what the user should know."""
    cause = _first_cause(error)
    if not isinstance(cause, RuntimeError):
        raise error
    if finding := go_on_without(cause):
        return finding
    reason = str(cause).strip().splitlines()[0].rstrip(".")
    part = model.compute_in_float32(error) if _computes_in_half(run, model) else ""
    if not part:
        raise StepError(f"{model.name} cannot train here: {reason}") from error
    return f"{part} of {model.name} computes in float32, because in bfloat16: {reason}"


def clients_of(count: int) -> str:
    """Return "3 clients together", or "one client"."""
    return f"{count} clients together" if count > 1 else "one client"


def out_of_memory(error: torch.OutOfMemoryError) -> str:
    """Say how much memory was missing, as the start of an error."""
    wanted = found[1] if (found := TRIED.search(str(error))) else ""
    if not torch.cuda.is_available():
        return "out of memory"
    free, total = torch.cuda.mem_get_info()
    held = memory.size(torch.cuda.memory_allocated())
    return (
        f"out of GPU memory: {held} were taken and {wanted or 'more'} needed, but {memory.size(free)} of "
        f"{memory.size(total)} are free"
    )


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _computes_in_half(run: Run, model: Model) -> bool:
    return run.training.precision == "bfloat16" or getattr(model, "dtype", None) == torch.bfloat16
