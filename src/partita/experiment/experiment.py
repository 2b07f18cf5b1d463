"""The parts of a run, built and checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch

from partita.core import tensors
from partita.core.model import Model
from partita.core.rounds import Engine, initial_server
from partita.core.settings import Run
from partita.data import Federation
from partita.engines.availability import Availability, read_trace
from partita.engines.compile_choice import CompileChoice
from partita.evaluation import Evaluator
from partita.experiment.config_tables import Config
from partita.experiment.subgroups import Groups, find_groups
from partita.privacy.guard import PrivacyGuard
from partita.storage.client_store import ClientStore
from partita.storage.initial_values import InitialValues
from partita.training.cuda_graphs import GraphCache


@dataclass(frozen=True)
class Pace:
    """How the clients of a run are trained on this machine: what "auto" chose.

    Attributes:
        block: The number of clients that train together.
        one_by_one: Why clients cannot train together; "" if they can.
        compiling: Whether the model is compiled.
        graphs: The CUDA graphs of training steps; None without.
        findings: What this device lacks, in sentences.
    """

    block: int = 1
    one_by_one: str = ""
    compiling: CompileChoice = field(default_factory=lambda: CompileChoice(False))
    graphs: GraphCache | None = None
    findings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """The parts of a run.

    Attributes:
        make_engine: Builds the engine if its clients do not compute with the model of partita. It also tests: on the
            central examples of `federation` it answers with scores of its own.
        tester: Tests the model that all share in place of the engine, whose clients are remote.
    """

    config: Config
    device: torch.device
    run: Run
    model: Model
    federation: Federation
    evaluator: Evaluator
    guard: PrivacyGuard | None = None
    pace: Pace = field(default_factory=Pace)
    make_engine: Callable[[Experiment, ClientStore], Engine] | None = None
    tester: Engine | None = None

    @property
    def site_engine(self) -> Callable[[ClientStore], Engine] | None:
        """Builds the engine of a site; None if the model of partita computes there."""
        return None if self.make_engine is None else partial(self.make_engine, self)

    @cached_property
    def availability(self) -> Availability:
        """Which clients fail to answer, in a simulation."""
        settings = self.config.federation
        if self.run.method.pool:
            return Availability()
        trace = read_trace(Path(settings.availability_trace)) if settings.availability_trace else {}
        return Availability(settings.client_dropout, settings.straggler_rate, trace)

    @cached_property
    def subgroups(self) -> Groups:
        """The groups of the central test set that are scored."""
        return find_groups(self.federation.task, self.config.evaluate.subgroups)

    @cached_property
    def initial_values(self) -> InitialValues:
        """The values of the initial server, which checkpoints leave out as long as they do not change."""
        return InitialValues(initial_server(self.run, self.model))

    @cached_property
    def base_digest(self) -> str:
        """The SHA-256 of the weights that are frozen for good; "" if there are none."""
        weights = self.model.frozen_weights()
        return tensors.sha256(weights) if weights else ""
