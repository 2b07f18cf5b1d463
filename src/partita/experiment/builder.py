"""Build an experiment from a config. All parts are checked before the first round."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from partita import data, methods, models
from partita.core import tensors
from partita.core.batch_schedule import lengths_to_group
from partita.core.group_units import count_groups
from partita.core.method import Method
from partita.core.model import Model
from partita.core.own_code import digests
from partita.core.plan import RoundInfo, plan_for
from partita.core.registry import find_function
from partita.core.rng import Key
from partita.core.rounds import initial_server
from partita.core.sampling import Uniform, build_sampling
from partita.core.settings import Run, RunError
from partita.data import Federation, Task
from partita.data.cache import cache_folder
from partita.data.digest import examples_digest
from partita.data.groups import groups_at_several_clients
from partita.engines.attackers import add_attack, choose_attackers
from partita.engines.autotune import (
    bf16_slowdown,
    check_block,
    choose_block,
    choose_graphs,
    configure_backends,
    first_with_examples,
)
from partita.engines.availability import Availability, read_trace
from partita.engines.compile_choice import CompileChoice, choose_compile
from partita.engines.determinism import NotDeterministicError, set_determinism
from partita.engines.first_step import StepError, take_first_step
from partita.engines.program_cache import use_program_cache
from partita.engines.simulation import SimulationEngine
from partita.evaluation import Evaluator
from partita.evaluation.answers import with_generation
from partita.evaluation.own_metrics import with_own_metrics
from partita.experiment import early_stopping, fits
from partita.experiment.config import Config
from partita.experiment.config_code import check_recorded
from partita.experiment.config_tables import EngineConfig, FederationConfig
from partita.experiment.subgroups import Groups, find_groups
from partita.methods.client_ranks import rank_by_client
from partita.models.adapter_options import adapter_options
from partita.privacy.guard import PrivacyGuard, make_private
from partita.privacy.secret import draw, from_file
from partita.secure_aggregation.eligibility import check_eligible
from partita.storage.client_store import ClientStore
from partita.storage.initial_values import InitialValues
from partita.track import TRACKERS, check_installed
from partita.training.cuda_graphs import GraphCache
from partita.training.parameter_groups import parameter_groups


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
    one_by_one: str = ""  # why clients cannot train together
    findings: tuple[str, ...] = ()  # what this device lacks, in sentences
    compiling: CompileChoice = field(default_factory=lambda: CompileChoice(False))
    subgroups: Groups = field(default_factory=dict)  # of the central test set

    @cached_property
    def initial_values(self) -> InitialValues:
        """The values of the initial server, which checkpoints leave out as long as they do not change."""
        return InitialValues(initial_server(self.run, self.model))

    @cached_property
    def base_digest(self) -> str:
        """The SHA-256 of the weights that are frozen for good; "" if there are none."""
        weights = self.model.frozen_weights()
        return tensors.sha256(weights) if weights else ""


def build(config: Config, secret: Key | None = None, federation: Federation | None = None) -> Experiment:
    """Build and check all parts of an experiment: method, data, model, run, and how the engine steps.

    Args:
        config: The experiment.
        secret: Key for the private random draws of the run, of which a key for its training data is made. Default: a
            new random key.
        federation: The data, if it is loaded already.

    Raises:
        RunError: If the parts do not fit each other, or this machine cannot run them.
        CodeError: If own code has changed since the config was read.
    """
    check_recorded(config.code, digests(config.references()))
    for name in config.track.to:
        check_installed(name)
        find_function(TRACKERS, name, "tracker")
    key, device = Key(config.seed), _configure_torch(config.engine)
    trained_method = build_method(config.method)
    fits.check(fits.Parts(config, trained_method))
    loaded = build_data(config, trained_method, key) if federation is None else federation
    method, raw_federation = _with_attackers(config, trained_method, loaded, key)
    task = raw_federation.task
    fits.check(fits.Parts(config, task=task))
    if config.training.group_by_length:
        lengths_to_group(task.train, torch.arange(0))  # refuses data without texts
    method = _with_ranks(config, method, raw_federation.clients)
    raw_model = build_model(config.model, method, task, key)
    fits.check(fits.Parts(config, task=task, model=raw_model))
    if config.model.get("frozen") and not raw_model.initial:
        raise RunError(
            "model.frozen leaves no parameter to train; freeze fewer tags, or train an adapter: [model.adapter]"
        )
    drops = config.training.dropout and raw_model.uses_dropout()
    if task.new:
        raw_model.for_classes(task.new.classes)  # refuses before any training if it cannot
    if config.engine.cache_frozen:
        model, federation = _cached(raw_model, raw_federation)
        if drops:
            warnings.warn(
                "engine.cache_frozen: the cached layers run without dropout, because their outputs are computed once; "
                "the layers above them have it",
                stacklevel=2,
            )
    else:
        model, federation = raw_model, raw_federation.to(device)
    secret = _bound(secret, raw_federation) if secret else new_secret(config)
    run, guard = build_run(config, method, model, federation, key, secret)
    fits.check(fits.Parts(config, task=task, model=model, run=run, federation=federation, guard=guard))
    availability = _availability(config.federation, method)
    if device.type == "cpu" and "bfloat16" in (config.training.precision, config.model.get("dtype")):
        _warn_slow_bf16(bf16_slowdown())
    model.to(device)
    findings = _first_step(config, run, model, federation, device)
    block, reason = _choose_block(config, run, raw_model, raw_federation, device)
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
        warnings.warn(finding, stacklevel=2)
    compiling = _choose_compile(config, run, model, federation, device, block)
    graphs = choose_graphs(
        config.engine.cuda_graphs, compiling.compile, device, strict_compile=config.engine.compile is True
    )
    if device.type == "cpu":
        check_block(run, model, federation.clients, block)
    _check_plan(run, model, federation.clients[0])
    wanted = config.evaluate
    evaluator = with_generation(task.kind.evaluator(task.classes), wanted.max_new_tokens, wanted.generate_examples)
    evaluator = with_own_metrics(evaluator, wanted.metrics)
    early_stopping.validation_metric(config, evaluator)
    subgroups = find_groups(task, config.evaluate.subgroups)
    return Experiment(
        config,
        run,
        model,
        federation,
        availability,
        device,
        block,
        evaluator,
        guard,
        graphs,
        reason,
        tuple(findings),
        compiling,
        subgroups,
    )


def _choose_compile(
    config: Config, run: Run, model: Model, federation: Federation, device: torch.device, block: int
) -> CompileChoice:
    """Decide whether to compile, and set the folder in which torch keeps compiled programs."""
    engine = config.engine
    if engine.compile == "auto":
        model.to(device)
        half = "bfloat16" in (config.training.precision, config.model.get("dtype"))
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


def build_method(options: Mapping[str, Any]) -> Method:
    """Build the method from the table `[method]`."""
    return methods.build(options["name"], _without_name(options))


def build_data(config: Config, method: Method, key: Key) -> Federation:
    """Load the data and split it among clients. A method that pools its clients gets one.

    Raises:
        RunError: If the method names a client that does not exist.
    """
    group = config.privacy.group if config.privacy else None
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


def build_model(options: Mapping[str, Any], method: Method, task: Task, key: Key) -> Model:
    """Build the model from the table `[model]`, with what the method adds to it."""
    model = models.build(options["name"], task, key / "model", **_without_name(options))
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
        experiment.block,
        experiment.device,
        store,
        experiment.availability,
        evaluator=experiment.evaluator,
        graphs=experiment.graphs,
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


def _first_step(
    config: Config, run: Run, model: Model, federation: Federation, device: torch.device, clients: int = 1
) -> list[str]:
    """Take the first step of a run on a GPU or in bfloat16, and return what the user should know of it."""
    client = first_with_examples(federation)
    half = "bfloat16" in (config.training.precision, config.model.get("dtype"))
    if client is None or (device.type == "cpu" and not half):
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


def _availability(federation: FederationConfig, method: Method) -> Availability:
    trace = read_trace(Path(federation.availability_trace)) if federation.availability_trace else {}
    return Availability() if method.pool else Availability(federation.client_dropout, federation.straggler_rate, trace)


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
    options, name = _without_name(config.data), config.data["name"]
    return {"tokenizer": config.model.get("path"), **options} if data.takes(name, "tokenizer") else options


def _cached(model: Model, federation: Federation) -> tuple[Model, Federation]:
    """Replace the examples by the output of the lowest frozen layers, computed once, and drop those layers."""
    from partita.models.frozen_cache import cache_frozen

    task = federation.task
    new = () if task.new is None else (task.new.examples,)
    above, (train, test, *cached_new) = cache_frozen(model, task.train, task.test, *new)
    held = replace(task.new, examples=cached_new[0]) if task.new else None
    return above, replace(federation, task=replace(task, train=train, test=test, new=held))  # type: ignore[arg-type]


def _without_name(options: Mapping[str, Any]) -> dict[str, Any]:
    return {option: value for option, value in options.items() if option != "name"}


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


def _warn_slow_bf16(times: float) -> None:
    """Warn if bfloat16 is slow on this machine."""
    if times > 2:
        warnings.warn(
            f"bfloat16 is about {times:.0f} times slower than float32 on this CPU; to try a run here, set "
            "training.precision and model.dtype to 'float32'",
            stacklevel=3,
        )
