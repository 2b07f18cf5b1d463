"""Choose how a run steps on this machine: how many clients together, compiled or not, as CUDA graphs or not."""

from __future__ import annotations

import warnings

import torch

from partita.core.model import Model
from partita.core.settings import Run, RunError
from partita.data import Federation
from partita.data.cache import cache_folder
from partita.engines.autotune import bf16_slowdown, check_block, choose_block, choose_graphs, first_with_examples
from partita.engines.compile_choice import CompileChoice, choose_compile
from partita.engines.determinism import NotDeterministicError
from partita.engines.first_step import StepError, take_first_step
from partita.engines.program_cache import use_program_cache
from partita.experiment.config_tables import Config
from partita.experiment.experiment import Experiment, Pace


def choose_pace(experiment: Experiment, whole: Model, held: Federation) -> Pace:
    """Take a first step, and choose what the config leaves to "auto".

    Args:
        experiment: The experiment, without a pace.
        whole: The model, also if the experiment's starts above a cache of frozen layers.
        held: The data, also if the experiment's is such a cache.

    Raises:
        RunError: If this machine cannot run the experiment as configured.
    """
    config, run, device = experiment.config, experiment.run, experiment.device
    model, federation = experiment.model, experiment.federation
    if device.type == "cpu" and _computes_in_half(config):
        _warn_slow_bf16(bf16_slowdown())
    model.to(device)
    findings = _first_step(config, run, model, federation, device)
    block, reason = _choose_block(config, run, whole, held, device)
    if block > 1:
        try:
            findings += _first_step(config, run, model, federation, device, clients=2)
        except (StepError, NotDeterministicError) as error:
            block, reason = 1, str(error)
    if reason and config.engine.clients_per_block not in (1, "auto"):
        raise RunError(
            f"engine.clients_per_block is {config.engine.clients_per_block}, but clients of this model train one at a "
            f"time: {reason}; set it to 1 or 'auto'"
        )
    for finding in findings:
        warnings.warn(finding, stacklevel=3)
    compiling = _choose_compile(config, run, model, federation, device, block)
    graphs = choose_graphs(
        config.engine.cuda_graphs, compiling.compile, device, strict_compile=config.engine.compile is True
    )
    if device.type == "cpu":
        check_block(run, model, federation.clients, block)
    return Pace(block, reason, compiling, graphs, tuple(findings))


def _computes_in_half(config: Config) -> bool:
    return "bfloat16" in (config.training.precision, config.model.get("dtype"))


def _first_step(
    config: Config, run: Run, model: Model, federation: Federation, device: torch.device, clients: int = 1
) -> list[str]:
    """Take the first step of a run on a GPU or in bfloat16, and return what the user should know of it."""
    client = first_with_examples(federation)
    if client is None or (device.type == "cpu" and not _computes_in_half(config)):
        return []
    return take_first_step(run, model, federation, client, clients)


def _choose_block(
    config: Config, run: Run, model: Model, federation: Federation, device: torch.device
) -> tuple[int, str]:
    """Return the number of clients that train together, and why it is 1 if the model cannot train more."""
    engine = config.engine
    block = engine.clients_per_block
    if block == "auto":
        captures = engine.cuda_graphs is not False or engine.compile is True
        block = choose_block(run, model, federation, device, captures, engine.workers)
    reason = _why_one_by_one(model, federation) if block > 1 else ""
    return (1 if reason else block), reason


def _why_one_by_one(model: Model, federation: Federation) -> str:
    """Return why clients cannot train in a block; "" if they can, or if no client trains here."""
    client = first_with_examples(federation)
    if client is None:
        return ""
    return model.why_one_by_one(federation[client].train.take(torch.zeros(1, dtype=torch.long)).inputs)


def _choose_compile(
    config: Config, run: Run, model: Model, federation: Federation, device: torch.device, block: int
) -> CompileChoice:
    """Decide whether to compile, and set the folder in which torch keeps compiled programs."""
    engine = config.engine
    if engine.compile == "auto":
        model.to(device)
        half = _computes_in_half(config)
        choice = choose_compile(run, model, federation, device, block, engine.workers, half)
    else:
        choice = CompileChoice(engine.compile)
    if choice.compile:
        try:
            use_program_cache(cache_folder())
        except RunError as error:
            if engine.compile is True:
                raise
            return CompileChoice(False, str(error))
    return choice


def _warn_slow_bf16(times: float) -> None:
    """Warn if bfloat16 is slow on this machine."""
    if times > 2:
        warnings.warn(
            f"bfloat16 is about {times:.0f} times slower than float32 on this CPU; to try a run here, set "
            "training.precision and model.dtype to 'float32'",
            stacklevel=3,
        )
