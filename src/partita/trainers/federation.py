"""A federation of Trainers in one process, recorded like every other run."""

from __future__ import annotations

import tomllib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import distributed

from partita.core.given import PREFIX
from partita.core.method import Method
from partita.core.options import OptionError
from partita.core.own_code import end_at_fit, is_read_as_config
from partita.core.rng import Key
from partita.core.rounds import Engine, initial_server
from partita.core.settings import RunError
from partita.data import Federation, Table, Task
from partita.data.client_ids import NamedClients
from partita.experiment import run_folder, runner
from partita.experiment.builder import build_method, build_run, new_secret
from partita.experiment.config import HANDED_OVER, parse
from partita.experiment.config_tables import Config, drop_none
from partita.experiment.experiment import Experiment
from partita.experiment.handing_over import TRAINER
from partita.experiment.recorded_model import RecordedModel
from partita.experiment.run_names import default_folder
from partita.fitting import method_table
from partita.record import file_names
from partita.record.row import Row
from partita.runs import Fitted, load_run
from partita.storage import checkpoint
from partita.storage.client_store import ClientStore
from partita.tasks import LM
from partita.trainers import checks
from partita.trainers.engine import CarryOut, Crew, Test, TrainerEngine, made
from partita.trainers.model import TrainerModel
from partita.trainers.scores import scores_of
from partita.trainers.site import TrainerSite

# What a record says of each Trainer.
RECORDED = (
    *("optim", "learning_rate", "lr_scheduler_type", "weight_decay", "max_grad_norm", "num_train_epochs", "max_steps"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "seed"),
)


class HandedOver(Config):
    """A config whose data, model and training were Trainers. Its file says what they were, and does not start a run."""

    def to_toml(self, folder: Path | None = None) -> str:
        raw = tomllib.loads(super().to_toml(folder))
        return tomli_w.dumps({key: value for key, value in raw.items() if key not in ("training", "split", "engine")})


def federate(
    trainers: Mapping[str, Any],
    method: str | Mapping[str, Any] | Method,
    *,
    rounds: int,
    folder: Path | str | None = None,
    seed: int = 0,
    test: Test | None = None,
    resume: bool = False,
    overwrite: bool = False,
    **tables: Any,
) -> Fitted:
    """Train several Trainers as the clients of one federation, and record the run.

    In a file, this call is a config for sites, each of which trains the Trainer of its own name.

    In each round every Trainer gets the server's parameters, `train()` runs once, and the plan says what goes back. At
    the end each module holds its client's model. Clients start from the first Trainer's parameters.

    Args:
        trainers: A Trainer for each client, by name: of transformers, or one that inherits from it, as TRL's do; or a
            function that makes it, which a site calls only for its own name.
        method: A method: its name, a table with its name and options, or a `Method`.
        rounds: The number of rounds.
        folder: The run folder. Default: runs/LABEL-seed-N.
        seed: The seed of the run, also for the order of examples in each round.
        test: Returns the scores of a module, for the central test. Default: no central test.
        resume: If the folder holds this very run, continue it after its last finished round instead of failing.
        overwrite: Delete the run in the folder first.
        **tables: Tables of a config, such as `federation`, `privacy`, `secure_aggregation` and `evaluate`.

    Raises:
        RunError: If a Trainer cannot take part.
        MethodError: If the method cannot run on Trainers.
        OptionError: If a table does not apply to Trainers.
        RunFolderError: If the folder already holds a run.
    """
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise RunError("partita.federate runs in one process; use partita.patch, in which torchrun trains one client")
    if resume and overwrite:
        raise OptionError("resume continues a run and overwrite deletes it; choose one")
    given = Path(folder) if folder else None
    if is_read_as_config(federate):
        first = {name: made(each) for name, each in islice(trainers.items(), 1)}
        end_at_fit(federate, *config_for_sites(first, method, rounds, seed, test, tables, [*trainers], trainers))
    trainers = {name: made(each) for name, each in trainers.items()}
    crew, experiment, place = assemble(trainers, method, rounds, seed, test, tables, given, resume)
    try:
        deque(recorded_rows(experiment, crew.carry_out, place, resume, overwrite), maxlen=0)
        last = last_model(experiment, place)
        for client, site in crew.sites.items():
            site.put(last.params(client))
    finally:
        for site in crew.sites.values():
            site.leave()
    return load_run(place)


def settings_of(
    trainers: Mapping[str, Any],
    method: str | Mapping[str, Any] | Method,
    rounds: int,
    seed: int,
    test: Test | None,
    tables: Mapping[str, Any],
) -> tuple[Method, dict[str, Any]]:
    """Check Trainers, whose rows need not be here, and return the method and the config as nested dicts."""
    if not trainers:
        raise OptionError("there is no Trainer; give one for each client, by name")
    checks.check_tables(tables)
    for client, trainer in trainers.items():
        checks.check_trainer(client, trainer)
    if isinstance(method, Method):
        table = dict(method.recipe or {"name": "fedavg"})
    else:
        table = dict(method) if isinstance(method, Mapping) else {"name": method}
    built = method if isinstance(method, Method) else build_method(table)
    checks.check_method(built)
    for client, trainer in trainers.items():
        checks.check_steps(built, client, trainer)
    keep = bool(tables.get("training", {}).get("keep_optimizer", False))
    scored = any(trainer.eval_dataset is not None for trainer in trainers.values())
    filled = {
        "evaluate": {"every": int(test is not None), "personal_every": int(scored), **tables.get("evaluate", {})},
        "training": drop_none(asdict(checks.training_of(next(iter(trainers.values())), keep))),
    }
    return built, {"rounds": rounds, "seed": seed, **tables, "method": table, **filled}


def config_for_sites(
    trainers: Mapping[str, Any],
    method: str | Mapping[str, Any] | Method,
    rounds: int,
    seed: int,
    test: Test | None,
    tables: Mapping[str, Any],
    sites: Sequence[str],
    named: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config of a federation of sites, and the objects that it names. The first arguments are as before.

    Args:
        trainers: The Trainers that are built, of which the first says the settings.
        method: The method.
        rounds: The number of rounds.
        seed: The seed.
        test: The central test.
        tables: Further tables.
        sites: The names of all sites.
        named: What the file calls by a name: the Trainer, or the dict of all.
    """
    if not sites:
        raise OptionError("patch does not say which sites take part; add clients=['north', 'south']")
    _, raw = settings_of(trainers, method, rounds, seed, test, tables)
    about = {"name": TRAINER, "source": PREFIX}
    own = {
        "method": method_table(method),
        "data": about if test is None else {**about, "test": getattr(test, "__name__", "")},
        "model": about,
        "split": {"name": "site", "sites": [*sites], "validation": 0.0, "test": 0.0},
        "engine": {"device": "cpu"},  # of the server's arithmetic; a Trainer chooses its own
    }
    return {**raw, **own}, {"data": named, "model": named}


def assemble(
    trainers: Mapping[str, Any],
    method: str | Mapping[str, Any] | Method,
    rounds: int,
    seed: int,
    test: Test | None,
    tables: Mapping[str, Any],
    folder: Path | None,
    resume: bool,
) -> tuple[Crew, Experiment, Path]:
    """Build and check all parts of a run, and return them with its folder. The arguments are those of `federate`."""
    built, raw = settings_of(trainers, method, rounds, seed, test, tables)
    for client, trainer in trainers.items():
        checks.check_rows(client, trainer)
    config = parse(raw)
    keep = config.training.keep_optimizer
    training = {client: checks.training_of(trainer, keep) for client, trainer in trainers.items()}
    most = max(each.steps or each.epochs * checks.size_of(trainers[client]) for client, each in training.items())
    models = {client: TrainerModel(trainer.model) for client, trainer in trainers.items()}
    first, model = next(iter(models.items()))
    if not model.initial:
        raise RunError(f"no parameter of {model.name} requires a gradient, so nothing would train")
    checks.check_alike(models, first)
    unnamed = isinstance(method, Method) and method.recipe is None
    named = {"name": built.name} if unnamed else config.method
    about = {"name": HANDED_OVER, "clients": {client: _about(trainer) for client, trainer in trainers.items()}}
    config = replace(
        config,
        method=named,
        data=about,
        split={"name": HANDED_OVER},
        model={"name": HANDED_OVER, "path": model.name},
        label=tables.get("label") or (built.name if unnamed else config.label),
        training=replace(config.training, steps=max(1, most)),  # the server refuses more
    )
    config = HandedOver(**{item.name: getattr(config, item.name) for item in fields(Config)})
    federation = _federation({client: checks.size_of(trainer) for client, trainer in trainers.items()})
    place = folder or default_folder(config.label, seed)
    secret = runner.restore_secret(config, place) if resume and _holds_run(place) else new_secret(config)
    run, guard = build_run(config, built, model, federation, Key(seed), secret)
    checks.check_plans(run, model, [*trainers])
    experiment = Experiment(
        config, torch.device("cpu"), run, model, federation, scores_of(test, trainers[first]), guard
    )
    alone = len(trainers) == 1
    sites = {
        client: TrainerSite(client, trainer, models[client], training[client], alone)
        for client, trainer in trainers.items()
    }
    return Crew(run, model, sites, test), experiment, place


def recorded_rows(
    experiment: Experiment, carry_out: CarryOut, folder: Path, resume: bool = False, overwrite: bool = False
) -> Iterator[Row]:
    """Check the folder, and return the rows of the run, whose rounds run as rows are drawn."""

    def make_engine(built: Experiment, store: ClientStore) -> Engine:
        return TrainerEngine(built.run, built.federation.clients, store, carry_out, built.availability)

    experiment = replace(experiment, make_engine=make_engine)
    if not resume or not _holds_run(folder):
        runner.check_free(folder, overwrite)
        return runner.start_built(experiment, folder, overwrite)
    recorded = tomllib.loads((folder / file_names.CONFIG).read_text(encoding="utf-8"))
    given = tomllib.loads(experiment.config.to_toml())
    if differing := sorted(key for key in {**recorded, **given} if recorded.get(key) != given.get(key)):
        raise run_folder.RunFolderError(
            f"{folder} holds another run: [{differing[0]}] is {recorded.get(differing[0])} there and "
            f"{given.get(differing[0])} here; choose another folder"
        )
    run_folder.verify(folder)
    return runner.resume_built(experiment, folder)


def _holds_run(folder: Path) -> bool:
    return (folder / file_names.CONFIG).exists()


def last_model(experiment: Experiment, folder: Path) -> RecordedModel:
    """Return the model after the last recorded round."""
    identity = run_folder.verify(folder)
    first = initial_server(experiment.run, experiment.model)
    saved = checkpoint.newest(
        folder / file_names.CHECKPOINTS, identity, first, experiment.device, experiment.initial_values
    )
    return RecordedModel(folder, identity or "", experiment, saved)


def _about(trainer: Any) -> dict[str, Any]:
    """Return what the record says of a Trainer."""
    args = {name: checks.plain(getattr(trainer.args, name)) for name in RECORDED}
    return {"trainer": type(trainer).__name__, "examples": checks.size_of(trainer), **args}


def _federation(sizes: Mapping[str, int]) -> Federation:
    """Return the clients with the numbers of their examples, which are not here."""
    total = sum(sizes.values())
    nothing = torch.arange(0)
    parts = [(rows, nothing, nothing) for rows in torch.arange(total).split([*sizes.values()])]
    task = Task(HANDED_OVER, Table({}, torch.zeros(total)), Table({}, torch.zeros(0)), (), kind=LM)
    return Federation(task, NamedClients([*sizes]), parts)
