"""Build an experiment from a config, or from objects. All parts are checked before the first round."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from partita import data, methods, models
from partita.core.batch_schedule import lengths_to_group
from partita.core.given import is_given
from partita.core.group_units import count_groups
from partita.core.method import Method
from partita.core.model import Model
from partita.core.own_code import digests
from partita.core.plan import RoundInfo, plan_for
from partita.core.registry import find_function, named, takes
from partita.core.rng import Key
from partita.core.sampling import Uniform, build_sampling
from partita.core.settings import Run, RunError
from partita.data import Federation, Task
from partita.data.digest import examples_digest
from partita.data.groups import groups_at_several_clients
from partita.engines.attackers import add_attack, choose_attackers
from partita.engines.autotune import (
    configure_backends,
)
from partita.engines.determinism import set_determinism
from partita.engines.simulation import SimulationEngine
from partita.evaluation import Evaluator
from partita.evaluation.answers import with_generation
from partita.evaluation.own_metrics import with_own_metrics
from partita.experiment import early_stopping, fits
from partita.experiment.config import Config
from partita.experiment.config_code import check_recorded
from partita.experiment.config_tables import EngineConfig
from partita.experiment.experiment import Experiment
from partita.experiment.handing_over import load_named_objects
from partita.experiment.pace import choose_pace
from partita.methods.client_ranks import rank_by_client
from partita.models.adapter_options import adapter_options
from partita.privacy.guard import PrivacyGuard, make_private
from partita.privacy.secret import draw, from_file
from partita.secure_aggregation.eligibility import check_eligible
from partita.storage.client_store import ClientStore
from partita.track import check_installed
from partita.training.parameter_groups import parameter_groups


def build(
    config: Config,
    secret: Key | None = None,
    *,
    federation: Federation | None = None,
    task: Task | None = None,
    model: Model | None = None,
) -> Experiment:
    """Build and check all parts of an experiment. Objects take the place of what their tables would build.

    Args:
        config: The experiment.
        secret: Key for the private random draws of the run, of which a key for its training data is made. Default: a
            new random key.
        federation: The data, split among the clients.
        task: The data, to be split.
        model: The model, without what the method adds to it.

    Raises:
        RunError: If the parts do not fit each other, or this machine cannot run them.
        CodeError: If own code has changed since the config was read.
    """
    key, device = Key(config.seed), _configure_torch(config.engine)
    _check_environment(config, device)
    method = build_method(config.method)
    fits.check(fits.Parts(config, method))
    method, held = _with_attackers(config, method, federation or build_data(config, method, key, task), key)
    _check_task(config, held.task)
    method = _with_ranks(config, method, held.clients)
    whole = build_model(config.model, method, held.task, key, model)
    _check_model(config, held.task, whole)
    trained, data = _cached(whole, held) if config.engine.cache_frozen else (whole, held.to(device))
    run, guard = build_run(config, method, trained, data, key, _bound(secret, held) if secret else new_secret(config))
    experiment = Experiment(config, device, run, trained, data, _evaluator(config, held.task), guard)
    _check_run(experiment)
    if isinstance(whole, RunsItself):
        return whole.prepared(experiment)
    return replace(experiment, pace=choose_pace(experiment, whole, held))


def _check_environment(config: Config, device: torch.device) -> None:
    """Refuse changed own code, trackers that are not installed, and objects where new processes would need them."""
    check_recorded(config.code, digests(config.references()))
    load_named_objects(config.objects, {"data": config.data, "model": config.model})
    for name in config.track.to:
        check_installed(name)
        find_function("tracker", name)
    given = [key for key in ("data", "model") if is_given(getattr(config, key).get("path"))]
    objects = [key for key in given if key not in config.objects]  # those with a name are loaded again
    if objects and config.engine.workers > 1 and device.type == "cuda":
        raise RunError(
            f"engine.workers is {config.engine.workers}, and on a GPU each worker loads the {objects[0]} itself, which "
            "was handed over as an object; set engine.workers = 1, or give a path"
        )


def _check_task(config: Config, task: Task) -> None:
    fits.check(fits.Parts(config, task=task))
    if config.training.group_by_length:
        lengths_to_group(task.train, torch.arange(0))  # refuses data without texts


def _check_model(config: Config, task: Task, model: Model) -> None:
    fits.check(fits.Parts(config, task=task, model=model))
    if config.model.get("frozen") and not model.initial:
        raise RunError(
            "model.frozen leaves no parameter to train; freeze fewer tags, or train an adapter: [model.adapter]"
        )
    if task.new:
        model.for_classes(task.new.classes)  # refuses before any training if it cannot
    if config.training.dropout and model.uses_dropout() and config.engine.cache_frozen:
        warnings.warn(
            "engine.cache_frozen: the cached layers run without dropout, because their outputs are computed once; "
            "the layers above them have it",
            stacklevel=3,
        )


def _check_run(experiment: Experiment) -> None:
    """Refuse what the parts show together, before anything trains."""
    config, run, model = experiment.config, experiment.run, experiment.model
    data, guard = experiment.federation, experiment.guard
    fits.check(fits.Parts(config, task=data.task, model=model, run=run, federation=data, guard=guard))
    _check_plan(run, model, data.clients[0])
    early_stopping.validation_metric(config, experiment.evaluator)
    _ = experiment.availability, experiment.subgroups  # which the config may name wrongly


def _evaluator(config: Config, task: Task) -> Evaluator:
    wanted = config.evaluate
    evaluator = with_generation(task.kind.evaluator(task.classes), wanted.max_new_tokens, wanted.generate_examples)
    return with_own_metrics(evaluator, wanted.metrics)


def build_method(options: Mapping[str, Any]) -> Method:
    """Build the method from the table `[method]`."""
    return methods.build(*named(options))


def build_data(config: Config, method: Method, key: Key, task: Task | None = None) -> Federation:
    """Load the data, unless it is given, and split it among clients. A method that pools its clients gets one.

    Raises:
        RunError: If the method names a client that does not exist.
    """
    group = config.privacy.group if config.privacy else None
    if task is None:
        task = data.load(config.data["name"], key / "data", together=group, **_data_options(config))
    federation = data.split(task, **config.split, key=key / "split", together=group)
    federation = federation.pooled() if method.pool else federation
    if unknown := sorted(name for name in method.clients if name not in federation.clients):
        known = ", ".join(federation.clients[:3])
        raise RunError(f"the method names client '{unknown[0]}', which does not exist; clients are {known}, ...")
    return federation


def client_names(config: Config) -> Sequence[str]:
    """Return the names of the clients. This loads and splits the data, but builds no model."""
    return build_data(config, build_method(config.method), Key(config.seed)).clients


def build_model(options: Mapping[str, Any], method: Method, task: Task, key: Key, model: Model | None = None) -> Model:
    """Build the model from the table `[model]`, unless it is given, with what the method adds to it."""
    if model is None:
        name, own = named(options)
        model = models.build(name, task, key / "model", **own)
    return method.extend(model, key / "extend") if method.extend else model


def build_run(
    config: Config, method: Method, model: Model, federation: Federation, key: Key, secret: Key | None = None
) -> tuple[Run, PrivacyGuard | None]:
    """Build the run and, if the config has a table `[privacy]`, the guard that adds noise to it.

    Returns:
        `(run, guard)`. With a guard, the run is the private one; without `[privacy]`, the guard is None.

    Raises:
        RunError: If the cohort, the secret or the privacy settings are impossible.
    """
    rule = Uniform() if method.pool else build_sampling(config.sampling)
    run = config.run(method, key, rule, federation.task.classes, _Sizes(federation), secret)
    run.check_sampling(federation.clients)
    if config.secure_aggregation:
        run = replace(run, drift=False)  # it is measured on single updates
    if not config.privacy:
        check_eligible(run, model, federation.clients)
        return run, None
    if config.privacy.unit == "group":
        _warn_shared_groups(federation, config.privacy.group)
    guard = make_private(run, model, dict(_Sizes(federation)), config.privacy)
    check_eligible(guard.run, model, federation.clients)
    return guard.run, guard


def build_engine(experiment: Experiment, store: ClientStore) -> SimulationEngine:
    """Build the engine that trains the clients on this machine."""
    return SimulationEngine(
        experiment.run,
        experiment.model,
        experiment.federation,
        experiment.pace.block,
        experiment.device,
        store,
        experiment.availability,
        evaluator=experiment.evaluator,
        graphs=experiment.pace.graphs,
    )


def _with_ranks(config: Config, method: Method, clients: Sequence[str]) -> Method:
    """Give each client the rank that the options of `[model.adapter]` say."""
    if "adapter" not in config.model:
        return method
    options = adapter_options(config.model["adapter"])
    if len(options.bounds) == 1:
        return method
    return rank_by_client(method, options.rank_of(clients))


def _with_attackers(config: Config, method: Method, federation: Federation, key: Key) -> tuple[Method, Federation]:
    """Let the simulated attackers change the method's updates or their own labels."""
    settings = config.federation
    attackers = choose_attackers(federation.clients, 0 if method.pool else settings.attackers, key / "attackers")
    if attackers and settings.attack == "label-flip":
        return method, federation.with_flipped_labels(attackers)
    return add_attack(method, settings.attack, attackers, settings.attack_strength), federation


@runtime_checkable
class RunsItself(Protocol):
    """A model whose clients compute with an engine of their own."""

    def prepared(self, experiment: Experiment) -> Experiment:
        """Check all parts of an experiment, and return it with this engine."""
        ...


class _Sizes(Mapping[str, int]):
    """Number of training examples per client, or of groups, 0 if the examples are on another machine.

    Counted on demand: in a large population, most clients are never asked.
    """

    def __init__(self, federation: Federation) -> None:
        self.federation, self.sizes = federation, dict[str, int]()

    def __getitem__(self, client: str) -> int:
        if client not in self.sizes:
            train = self.federation[client].train
            self.sizes[client] = len(train) if self.federation.groups is None else count_groups(train)
        return self.sizes[client]

    def __iter__(self) -> Iterator[str]:
        return iter(self.federation.clients)

    def __len__(self) -> int:
        return len(self.federation.clients)


def _data_options(config: Config) -> dict[str, Any]:
    """Return the data options. The tokenizer defaults to the model's."""
    name, options = named(config.data)
    more = {"tokenizer": config.model.get("path"), "client": config.split.get("client")}
    return {**{key: value for key, value in more.items() if value and takes("data", name, key)}, **options}


def _cached(model: Model, federation: Federation) -> tuple[Model, Federation]:
    """Replace the examples by the output of the lowest frozen layers, computed once, and drop those layers."""
    from partita.models.frozen_cache import cache_frozen

    task = federation.task
    new = () if task.new is None else (task.new.examples,)
    above, (train, test, *cached_new) = cache_frozen(model, task.train, task.test, *new)
    held = replace(task.new, examples=cached_new[0]) if task.new else None
    return above, replace(federation, task=replace(task, train=train, test=test, new=held))  # type: ignore[arg-type]


def makes_secret(config: Config) -> bool:
    """Return whether the run has a secret for the private random draws."""
    return config.privacy is not None and not config.privacy.repeatable


def new_secret(config: Config) -> Key | None:
    """Draw the secret of a new run, to which `engine.secret_file` adds; None for a run without one.

    No two runs share a secret. Their noise would be equal, and two models of data that differ in one record would
    reveal that record.

    Raises:
        PrivacyError: If the file cannot be used.
    """
    file = config.engine.secret_file
    if file is None:
        return draw() if makes_secret(config) else None
    return draw(from_file(Path(file)))


def _bound(secret: Key, federation: Federation) -> Key:
    """Return the secret for the draws on these training examples. Other examples get other noise."""
    train = federation.task.train
    return secret / examples_digest(train) if len(train) and not secret.path else secret


def _configure_torch(engine: EngineConfig) -> torch.device:
    """Configure torch for this process and return the device."""
    if engine.threads:
        torch.set_num_threads(engine.threads)
    configure_backends(engine.onednn)
    device = _device(engine.device)
    if device.type == "cuda":
        set_determinism(engine.deterministic)
    return device


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise RunError("engine.device is 'cuda', but torch sees no GPU; use 'cpu', or install a CUDA build of torch")
    return torch.device("cuda" if name == "auto" and torch.cuda.is_available() else "cpu" if name == "auto" else name)


def _check_plan(run: Run, model: Model, client: str) -> None:
    """Compute the plan of the first and last round and the adaptation, so that errors come before any training."""
    for round in (0, run.rounds - 1):
        plan = plan_for(run.method.plan, model, RoundInfo(round, run.rounds, client))
        parameter_groups(run.training, model, plan.train)
    if run.method.adapt:
        run.method.adapt(model)


def _warn_shared_groups(federation: Federation, column: str | None) -> None:
    """Warn if a value of the group column is at several clients."""
    shared, total = groups_at_several_clients(federation)
    if shared:
        warnings.warn(
            f"{shared:,} of {total:,} values of column '{column}' have examples at several clients; the guarantee is "
            "for what one client has of a value, and its cost adds up over clients: use split.name = 'groups' with "
            "this column, or another split that keeps a value at one client",
            stacklevel=3,
        )
