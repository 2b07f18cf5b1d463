"""Build an experiment from a config. All parts are checked before the first round."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from partita import data, methods, models
from partita.core.model import Model
from partita.core.plan import RoundInfo, plan_for
from partita.core.rng import Key
from partita.core.settings import Run, RunError
from partita.data import Federation
from partita.engines.autotune import bf16_slowdown, check_block, choose_block, choose_graphs, configure_backends
from partita.engines.availability import Availability, read_trace
from partita.evaluation import Evaluator
from partita.experiment.config import Config, EngineConfig, shared_digest
from partita.privacy.guard import PrivacyGuard, make_private
from partita.privacy.secret import draw, from_file
from partita.training.cuda_graphs import GraphCache


@dataclass(frozen=True)
class Experiment:
    """The parts of a run, built and checked."""

    config: Config
    run: Run
    model: Model
    federation: Federation
    availability: Availability
    device: torch.device
    block: int  # clients that train together
    evaluator: Evaluator
    guard: PrivacyGuard | None = None
    graphs: GraphCache | None = None


def build(config: Config, secret: Key | None = None) -> Experiment:
    """Build and check all parts of an experiment.

    Args:
        config: The experiment.
        secret: Key for the private random draws of a run without `engine.secret_file`. Default: a new random key.

    Raises:
        RunError: The parts do not fit each other, or this machine cannot run them.
    """
    key = Key(config.seed)
    device = _ready(config.engine)
    method = methods.build(config.method["name"], _rest(config.method, "name"))
    task = data.load(config.data["name"], key / "data", **_data_options(config))
    federation = data.split(task, **config.split, key=key / "split")
    federation = federation.pooled() if method.pool else federation
    if unknown := sorted(name for name in method.clients if name not in federation.clients):
        known = ", ".join(federation.clients[:3])
        raise RunError(f"the method names client '{unknown[0]}', which does not exist; clients are {known}, ...")
    model = models.build(config.model["name"], task, key / "model", **_rest(config.model, "name"))
    model = method.extend(model, key / "extend") if method.extend else model
    whole = model, federation
    model, federation = _cached(*whole) if config.engine.cache_frozen else (model, federation.to(device))
    federate = config.federation
    run = Run(
        method,
        config.training.build(),
        config.rounds,
        key,
        cohort=1.0 if method.pool else federate.cohort,
        min_updates=federate.min_updates,
        skip_failed_clients=federate.skip_failed_clients,
        clients_have_initial_model=federate.clients_have_initial_model,
        max_norm=federate.max_norm,
        max_examples=federate.max_examples,
        examples=_Sizes(federation),
        drift=config.evaluate.drift,
        secret=_secret(config, secret),
    )
    run.cohort_size(len(federation.clients))
    guard = None
    if config.privacy:
        sizes = {client: len(federation[client].train) for client in federation.clients}
        guard = make_private(run, model, sizes, config.privacy)
        run = guard.run
    trace = read_trace(Path(federate.availability_trace)) if federate.availability_trace else {}
    availability = (
        Availability() if method.pool else Availability(federate.client_dropout, federate.straggler_rate, trace)
    )
    if device.type == "cpu" and "bfloat16" in (config.training.precision, config.model.get("dtype")):
        _warn_slow_bf16(bf16_slowdown())
    graphs = choose_graphs(config.engine.cuda_graphs, config.engine.compile, device)
    block = config.engine.clients_per_block
    if block == "auto":
        block = choose_block(run, *whole, device, bool(graphs), config.engine.workers)
    if device.type == "cpu":
        check_block(run, model, federation.clients, block)
    plan_for(method.plan, model, RoundInfo(0, run.rounds, federation.clients[0]))
    plan_for(method.plan, model, RoundInfo(run.rounds - 1, run.rounds, federation.clients[0]))
    if method.adapt:
        method.adapt(model)  # fail now on an invalid phase, not after hours of training
    evaluator = task.kind.evaluator(task.classes)
    return Experiment(config, run, model, federation, availability, device, block, evaluator, guard, graphs)


class _Sizes(Mapping[str, int]):
    """Number of training examples per client, 0 if the examples are on another machine.

    Counted on demand: in a large population, most clients are never asked.
    """

    def __init__(self, federation: Federation) -> None:
        self.federation, self.found = federation, dict[str, int]()

    def __getitem__(self, client: str) -> int:
        if client not in self.found:
            self.found[client] = len(self.federation[client].train)
        return self.found[client]

    def __iter__(self) -> Iterator[str]:
        return iter(self.federation.clients)

    def __len__(self) -> int:
        return len(self.federation.clients)


def _warn_slow_bf16(times: float) -> None:
    if times > 2:
        warnings.warn(
            f"bfloat16 is about {times:.0f} times slower than float32 on this CPU; to try a run here, set "
            "training.precision and model.dtype to 'float32'",
            stacklevel=3,
        )


def _data_options(config: Config) -> dict[str, Any]:
    """Return the data options. The tokenizer defaults to the model's."""
    options, name = _rest(config.data, "name"), config.data["name"]
    return {"tokenizer": config.model.get("path"), **options} if data.takes(name, "tokenizer") else options


def _cached(model: Model, federation: Federation) -> tuple[Model, Federation]:
    """Replace the examples by the output of the lowest frozen layers, computed once, and drop those layers."""
    from partita.models.frozen_cache import cache_frozen

    task = federation.task
    above, (train, test) = cache_frozen(model, task.train, task.test)
    return above, replace(federation, task=replace(task, train=train, test=test))  # type: ignore[arg-type]


def _rest(table: Any, key: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != key}


def makes_secret(config: Config) -> bool:
    """Return whether the run creates its own secret for the private random draws."""
    return config.privacy is not None and not config.privacy.repeatable and config.engine.secret_file is None


def _secret(config: Config, given: Key | None) -> Key | None:
    if config.engine.secret_file is not None:
        if config.privacy is not None and config.privacy.repeatable:
            raise RunError(
                "privacy.repeatable draws noise from the seed, but engine.secret_file draws it from a file; remove one"
            )
        # Several experiments may use one file. Two that drew the same noise would reveal it.
        return from_file(Path(config.engine.secret_file)) / shared_digest(config)
    return (given or draw()) if makes_secret(config) else None


def _ready(engine: EngineConfig) -> torch.device:
    """Configure torch for this process and return the device."""
    if engine.threads:
        torch.set_num_threads(engine.threads)
    configure_backends(engine.onednn)
    device = _device(engine.device)
    if device.type == "cuda":
        # Otherwise the backward pass of fused attention sums in the order in which its blocks finish.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(engine.deterministic)
    return device


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise RunError("engine.device is 'cuda', but torch sees no GPU; use 'cpu', or install a CUDA build of torch")
    return torch.device("cuda" if name == "auto" and torch.cuda.is_available() else "cpu" if name == "auto" else name)
