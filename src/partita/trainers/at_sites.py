"""Trainers at sites: the server reads names and initial values, and each site trains the Trainer of its own file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import chdir
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from partita.core.data import Batch
from partita.core.options import OptionError, closest_match
from partita.core.own_code import CodeError, Reference, describe_error, load_function, load_object, parse_reference
from partita.core.rng import Key
from partita.core.rounds import Engine
from partita.core.settings import RunError
from partita.data.task import Table, Task
from partita.experiment.experiment import Experiment
from partita.models.loading import BATCH_NORMS
from partita.storage.client_store import ClientStore
from partita.tasks import LM, AnyClasses
from partita.trainers import checks
from partita.trainers.engine import Crew, Order, Test, TrainerEngine, made
from partita.trainers.model import TrainerModel
from partita.trainers.scores import scores_of
from partita.trainers.site import TrainerSite


@dataclass(frozen=True, eq=False)
class TrainerRows:
    """The examples of a Trainer, of which only digests are read here."""

    dataset: Any
    count: int

    def __len__(self) -> int:
        return self.count

    def take(self, indices: torch.Tensor) -> Batch:
        """Return digests of examples, as numbers."""
        plain = self.dataset.with_format(None) if hasattr(self.dataset, "with_format") else self.dataset
        digests = [_digest(plain[place]) for place in indices.tolist()]
        return Batch({"digest": torch.tensor(digests)}, torch.zeros(len(digests)))


def _digest(row: Any) -> int:
    text = json.dumps(row if isinstance(row, list | tuple) else dict(row), default=_described, sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


def _described(value: Any) -> Any:
    if not hasattr(value, "__array__"):  # tensors, arrays and images have it
        raise RunError(
            f"an example of train_dataset holds a {type(value).__name__}, which has no digest; give a tensor"
        )
    array = np.asarray(value)
    return [str(array.dtype), array.shape, hashlib.blake2b(array.tobytes()).hexdigest()]


@dataclass(frozen=True, eq=False)
class TrainerTask(Task):
    """A Trainer and its examples.

    Attributes:
        trainer: The Trainer.
        client: The site whose Trainer it is; None at the server.
        central: The central test, at the server.
        folder: The folder in which the Trainer was made, and trains.
    """

    trainer: Any = None
    client: str | None = None
    central: Test | None = None
    folder: Path = field(default_factory=Path.cwd)


def rows(source: str, test: str | None = None, client: str | None = None) -> TrainerTask:
    """A Trainer of a file that calls `patch` or `federate`. A config names it by its variable."""
    reference = parse_reference(source)
    assert reference is not None
    found = load_object(reference)
    if isinstance(found, Mapping):
        if client is not None and client not in found:
            raise OptionError(f"'{reference}' has no Trainer of '{client}'; {closest_match(client, [*found])}")
        found = found[next(iter(found)) if client is None else client]
    try:
        trainer = made(found)
    except Exception as error:
        raise CodeError(f"'{reference}' failed: {describe_error(error, str(reference.path))}") from error
    if isinstance(trainer.train_dataset, IterableDataset):
        raise RunError(
            f"train_dataset of '{reference}' is a stream, which a site cannot number; give it a list of rows"
        )
    central = load_function(Reference(reference.source, test)) if test and client is None else None
    kind = replace(LM, name="trainer", evaluator=AnyClasses(scores_of(central, trainer)))
    data: Any = TrainerRows(trainer.train_dataset, 0 if trainer.train_dataset is None else checks.size_of(trainer))
    nothing = Table({}, torch.zeros(0))
    return TrainerTask("trainer", data, nothing, (), kind=kind, trainer=trainer, client=client, central=central)


def model(task: TrainerTask, key: Key, *, source: str) -> SiteModel:
    """The model of a Trainer. A config names it by the Trainer's variable."""
    return SiteModel(task)


class SiteModel(TrainerModel):
    """The model of a Trainer at a site or at the server, which brings the engine of a run.

    Args:
        task: The Trainer.
    """

    def __init__(self, task: TrainerTask) -> None:
        super().__init__(task.trainer.model)
        self.task = task

    def prepared(self, experiment: Experiment) -> Experiment:
        """Refuse what the Trainer cannot do, and return the experiment with the engine of this Trainer."""
        config, run, task = experiment.config, experiment.run, self.task
        name = task.client or "the server"
        checks.check_trainer(name, task.trainer)
        if task.client is not None:
            checks.check_rows(name, task.trainer)
        if more := [key for key, value in config.split.items() if value and key not in ("sites", "client", "name")]:
            raise OptionError(
                f"split.{more[0]} does not reach into a Trainer; leave it out, and give it other examples"
            )
        if config.split["name"] != "site":
            raise OptionError(f"split.name is '{config.split['name']}', but each site has a Trainer; set it to 'site'")
        own = ("federation", "evaluate", "stop")
        tables = {table: _changed(getattr(config, table)) for table in own if getattr(config, table) is not None}
        checks.check_tables({**tables, **({"privacy": {"unit": config.privacy.unit}} if config.privacy else {})})
        wanted = checks.training_of(task.trainer, config.training.keep_optimizer)
        if other := sorted(_changed(wanted).items() ^ _changed(config.training).items()):
            raise OptionError(
                f"training.{other[0][0]} differs in the config and in the Trainer of {name}, which trains by its own; "
                "set it in the TrainingArguments of the file, and write the config again"
            )
        if config.evaluate.every and task.client is None and task.central is None:
            raise OptionError("evaluate.every needs a central test; give test=..., or set evaluate.every = 0")
        checks.check_method(run.method)
        checks.check_steps(run.method, name, task.trainer)
        checks.check_plans(run, self, [*experiment.federation.clients])
        for path, part in task.trainer.model.named_modules():
            if isinstance(part, BATCH_NORMS):
                raise RunError(
                    f"'{path}' is a {type(part).__name__}, whose statistics a site does not keep from round to round; "
                    "replace it with GroupNorm or LayerNorm"
                )
        return replace(experiment, make_engine=self.make_engine)

    def make_engine(self, experiment: Experiment, store: ClientStore) -> Engine:
        """Return the engine of the one client whose Trainer this is."""
        clients = experiment.federation.clients
        carry_out = partial(self._carry_out, experiment)
        return TrainerEngine(experiment.run, clients, store, carry_out, experiment.availability)

    def _carry_out(self, experiment: Experiment, order: Order) -> Any:
        """Carry out an order, and leave the Trainer as it was made: the next message may come to a new process."""
        task, client = self.task, order.job.client
        if order.kind != "test" and client != task.client:
            raise RunError(f"the Trainer of '{client}' is not on this machine; run the sites with 'partita flower'")
        training = checks.training_of(task.trainer, experiment.config.training.keep_optimizer)
        with chdir(task.folder):
            site = TrainerSite(client, task.trainer, self, training)
            try:
                return Crew(experiment.run, self, {client: site}, task.central).carry_out(order)
            finally:
                site.leave()
                site.put(self.initial)


def _changed(settings: Any) -> dict[str, Any]:
    """Return the settings of a table that are not the defaults."""
    return {
        each.name: getattr(settings, each.name)
        for each in fields(settings)
        if getattr(settings, each.name) != each.default
    }
