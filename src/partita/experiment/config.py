"""Experiment configs in strict TOML. Each table is validated against the function or dataclass that consumes it."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w

from partita import data, methods, models
from partita.core.optim import SGD, AdamW, Optimizer, Schedule
from partita.core.options import (
    MAX_NUMBER,
    Count,
    NotNegative,
    Option,
    OptionError,
    PartialShare,
    Positive,
    PositiveShare,
    Range,
    Seed,
    Share,
    Text,
    Whole,
    closest_match,
    format_value,
    options_of,
    unknown_key,
    validate_options,
)
from partita.core.own_code import Reference
from partita.core.registry import find_function
from partita.core.sampling import SAMPLING
from partita.core.secure_settings import SecureAggregation
from partita.core.settings import Augmentation, Run, Training
from partita.engines.attackers import AttackKind
from partita.experiment.config_code import anchored, changed, check_recorded, code_digests, portable, references_in
from partita.experiment.run_names import method_label, method_options, option_text
from partita.experiment.trusted_code import check_trusted
from partita.models.adapter_options import TABLE as ADAPTER_TABLE
from partita.models.adapter_options import AdapterOptions, adapter_options
from partita.privacy.guard import PrivacyConfig

Processes = Annotated[int, Range(low=1, high=1024)]


class ConfigError(ValueError):
    """The config cannot be read."""


@dataclass(frozen=True)
class TrainingConfig:
    """The `[training]` table."""

    lr: Annotated[Positive, "learning rate"] = 1e-3
    optimizer: Annotated[Literal["sgd", "adamw"], "the clients' optimizer"] = "adamw"
    weight_decay: Annotated[
        NotNegative | None,
        f"weight decay; AdamW decouples it from the gradient; if left out, {AdamW.weight_decay} for `adamw` and "
        f"{SGD.weight_decay:g} for `sgd`",
    ] = None
    momentum: Annotated[PartialShare, "momentum; `sgd` only"] = 0.0
    nesterov: Annotated[bool, "Nesterov momentum; `sgd` only"] = False
    decay_norms_and_biases: Annotated[
        bool, "apply weight decay to norms and biases too; `false` leaves them out, as transformers' Trainer does"
    ] = Training.decay_norms_and_biases
    layer_decay: Annotated[
        PositiveShare,
        "factor on the learning rate from layer to layer, from the head down to the embeddings; 1 for none",
    ] = Training.layer_decay
    warmup_steps: Annotated[
        Whole, "steps of linear learning rate warm-up at the start of each client's round (each phase of it)"
    ] = Training.warmup_steps
    label_smoothing: Annotated[
        PartialShare, "share of a target that is spread over all classes; evaluation does not smooth"
    ] = Training.label_smoothing
    class_weights: Annotated[
        Mapping[str, Positive] | None, "weight of each class in the training loss, by name; 1 for classes left out"
    ] = None
    augment: Annotated[tuple[Augmentation, ...], "random changes of training images, in this order"] = ()
    loss_average: Annotated[
        Literal["examples", "tokens"],
        "what the training loss of a batch averages over: its examples, or all its labeled tokens, as transformers' "
        "Trainer does; `tokens` and `lm` tasks only",
    ] = Training.loss_average
    dropout: Annotated[bool, "dropout in training, with the rates in the model's own config; `false` turns it off"] = (
        Training.dropout
    )
    keep_optimizer: Annotated[
        bool, "each client keeps its optimizer state (momentum, AdamW's moments) from round to round"
    ] = False
    batch_size: Annotated[Count, "examples per batch"] = Training.batch_size
    accumulate: Annotated[Count, "batches per optimizer step; their gradients are averaged over all examples"] = (
        Training.accumulate
    )
    group_by_length: Annotated[
        bool,
        "fill batches with texts of similar lengths, longest first, as transformers' `group_by_length` does; less "
        "padding, but batches depend on the lengths; texts only, and not with example- or group-level privacy",
    ] = Training.group_by_length
    epochs: Annotated[Count, "local epochs per round"] = Training.epochs
    steps: Annotated[Count | None, "local steps per round, instead of epochs"] = None
    clip: Annotated[Positive | None, "clipping norm for a client's gradient"] = None
    precision: Annotated[
        Literal["float32", "bfloat16"], "`bfloat16` trains in mixed precision; the weights stay in float32"
    ] = Training.precision
    schedule: Annotated[Literal["constant", "cosine", "linear", "step"], "learning rate schedule over the rounds"] = (
        "constant"
    )
    adapt_lr: Annotated[
        Positive | None,
        "learning rate, without a schedule, for methods that fine-tune a client's model before its personal test, and "
        "for `evaluate.unseen_epochs`; `lr` if left out",
    ] = None
    schedule_warmup: Annotated[Whole, "rounds of linear learning rate warm-up"] = 0
    schedule_floor: Annotated[Share, "`cosine` and `linear` end at this fraction of the learning rate"] = 0.0
    schedule_every: Annotated[Count, "`step`: rounds between learning rate drops"] = 10
    schedule_gamma: Annotated[Share, "`step`: factor applied at each drop"] = 0.1

    def build(self, classes: Sequence[str] | None = None) -> Training:
        """Create the training settings.

        Args:
            classes: The names of the task's classes, which `class_weights` needs; None to leave the weights out.

        Raises:
            OptionError: `momentum` or `nesterov` is set, but the optimizer is AdamW; or `class_weights` has an unknown
                class.
        """
        given = self.class_weights or {}
        if classes is not None and (unknown := [name for name in given if name not in classes]):
            remedy = closest_match(unknown[0], classes) if classes else "the task has no classes; leave it out"
            raise OptionError(f"training.class_weights names the class '{unknown[0]}'; {remedy}")
        if self.optimizer == "adamw" and (self.momentum or self.nesterov):
            raise OptionError("training.momentum and training.nesterov are for optimizer = 'sgd'; leave them out")
        default = SGD.weight_decay if self.optimizer == "sgd" else AdamW.weight_decay
        decay = default if self.weight_decay is None else self.weight_decay
        optimizer: Optimizer = AdamW(weight_decay=decay)
        if self.optimizer == "sgd":
            optimizer = SGD(self.momentum, decay, self.nesterov)
        schedule = Schedule(
            self.schedule, self.schedule_warmup, self.schedule_floor, self.schedule_every, self.schedule_gamma
        )
        return Training(
            self.lr,
            optimizer,
            schedule,
            self.batch_size,
            self.epochs,
            self.steps,
            self.clip,
            self.precision,
            self.accumulate,
            self.warmup_steps,
            self.layer_decay,
            self.decay_norms_and_biases,
            self.dropout,
            self.loss_average,
            self.label_smoothing,
            tuple(float(given.get(name, 1.0)) for name in classes) if given and classes is not None else (),
            tuple(self.augment),
            self.adapt_lr,
            self.group_by_length,
        )


@dataclass(frozen=True)
class FederationConfig:
    """The `[federation]` table."""

    cohort: Annotated[
        Count | PositiveShare, "clients per round: a number of clients, or a fraction with a decimal point"
    ] = Run.cohort
    client_dropout: Annotated[Share, "probability that a client drops out of a round"] = 0.0
    straggler_rate: Annotated[Share, "probability that a client completes only part of its local steps"] = 0.0
    availability_trace: Annotated[
        str | None, "CSV file with columns round, client, work; overrides the two rates where it has a row"
    ] = None
    attackers: Annotated[
        Whole | Share, "simulated attackers: a number of clients, or a fraction with a decimal point"
    ] = 0
    attack: Annotated[AttackKind, "what the simulated attackers do"] = "sign-flip"
    attack_strength: Annotated[Positive, "factor of the attack; `label-flip` ignores it"] = 5.0
    min_updates: Annotated[Whole, "minimum number of updates per round; the run stops if there are fewer"] = (
        Run.min_updates
    )
    skip_failed_clients: Annotated[bool, "record a client's failure and continue, instead of stopping the run"] = False
    max_norm: Annotated[Positive | None, "updates with a larger norm are scaled down to this norm"] = None
    max_examples: Annotated[Count, "largest number of training examples that a client of unknown size may report"] = (
        Run.max_examples
    )
    clients_have_initial_model: Annotated[bool, "clients already hold the initial model before the first round"] = False


@dataclass(frozen=True)
class EngineConfig:
    """The `[engine]` table."""

    clients_per_block: Annotated[Count | Literal["auto"], "clients that train together in one vmapped block"] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], "`auto` uses a GPU if there is one"] = "auto"
    workers: Annotated[Processes, "worker processes that share the clients; assigned to GPUs round-robin"] = 1
    client_state: Annotated[Literal["memory", "disk"], "where client state is kept between rounds"] = "memory"
    threads: Annotated[Processes | None, "number of torch threads; torch's own default if left out"] = None
    onednn: Annotated[bool | Literal["auto"], "use oneDNN kernels on CPUs"] = "auto"
    deterministic: Annotated[bool, "on a GPU: bitwise reproducible results, at some cost in speed"] = True
    cuda_graphs: Annotated[
        bool | Literal["auto"], "on a GPU: capture training steps as CUDA graphs; `true` stops the run if that fails"
    ] = "auto"
    compile: Annotated[
        bool | Literal["auto"],
        "use torch.compile; `auto` does on a GPU, if the run is long enough to win back the minute that it takes",
    ] = "auto"
    cache_frozen: Annotated[bool, "compute the output of the lowest frozen layers once per example"] = False
    secret_file: Annotated[str | None, "file with 16 or more random bytes; seeds the random draws for privacy"] = None
    ledger: Annotated[
        str | None,
        "privacy ledger, which adds up what private runs release and stops a run that would exceed its limit",
    ] = None


@dataclass(frozen=True)
class EvaluateConfig:
    """The `[evaluate]` table."""

    every: Annotated[Whole, "rounds between evaluations on the central test set; 0 for never"] = 1
    personal_every: Annotated[Whole, "rounds between evaluations on the clients' own test sets; 0 for never"] = 5
    validation_every: Annotated[
        Count | None,
        "rounds between evaluations on the clients' validation parts; left out: as `every`, or 1 if that is 0, if "
        "[stop] needs them, else never",
    ] = None
    validation_metric: Annotated[
        str | None, "metric on validation that [stop] and the best checkpoint go by; left out: the task's own"
    ] = None
    unseen_epochs: Annotated[
        Whole,
        "epochs for which a client that takes no part (`split.unseen`) trains its personal parameters before its test; "
        "the shared ones do not change; 0: it is tested with their initial values",
    ] = 0
    max_clients: Annotated[Count, "maximum number of clients evaluated; they are drawn once per run"] = 100
    drift: Annotated[bool, "measure client drift in every round"] = True
    max_new_tokens: Annotated[
        Count | None, "maximum number of tokens of a generated text; tasks that generate only; left out: 64"
    ] = None
    generate_examples: Annotated[
        Count | None,
        "generate texts for at most this many examples of a test set, the first ones; tasks that generate only; left "
        "out: all with `seq2seq`, none with `chat`",
    ] = None
    samples: Annotated[
        Annotated[int, Range(low=0, high=100)],
        "record this many examples of the central test set, in full, with what the model says before and after "
        "training, and show them in reports; not in a private run",
    ] = 0
    subgroups: Annotated[
        str | None, "column of the central test set; the task's own metric is recorded for each of its values"
    ] = None
    subgroup_min: Annotated[
        Count | None,
        "a subgroup of fewer examples (left out: 30) is marked in reports, and does not count for the gap",
    ] = None
    metrics: Annotated[
        tuple[str, ...], "your own metrics, such as `mine.py:recall`: functions of all logits and targets"
    ] = ()


@dataclass(frozen=True)
class CheckpointConfig:
    """The `[checkpoint]` table."""

    every: Annotated[Count, "rounds between checkpoints"] = 1


@dataclass(frozen=True)
class TrackConfig:
    """The `[track]` table."""

    to: Annotated[
        tuple[str, ...],
        "trackers that receive every row: `tensorboard`, `wandb`, `mlflow`, `trackio`, or your own functions, such as "
        "`mine.py:log`",
    ] = ()
    project: Annotated[str, "project of the built-in trackers"] = "partita"
    name: Annotated[Text, "name of the run in the built-in trackers; by default, its label and seed"] = ""
    group: Annotated[Text, "group of the run in the built-in trackers; by default, the folder of the comparison"] = ""


@dataclass(frozen=True)
class StopConfig:
    """The `[stop]` table: when a run ends before its last round.

    Raises:
        OptionError: If no condition is set, or `min_delta` has no effect.
    """

    patience: Annotated[Count | None, "stop after this many evaluations on validation without an improvement"] = None
    min_delta: Annotated[NotNegative, "smallest change of the metric that `patience` counts as an improvement"] = 0.0
    target: Annotated[
        Annotated[float, Range(low=-MAX_NUMBER, high=MAX_NUMBER)] | None,
        "stop when the metric on validation reaches this value",
    ] = None
    epsilon: Annotated[
        Positive | None, "stop before a round with which the spent epsilon would exceed this; only with [privacy]"
    ] = None

    def __post_init__(self) -> None:
        if self.patience is None and self.target is None and self.epsilon is None:
            raise OptionError("[stop] has no condition; set stop.patience, stop.target or stop.epsilon")
        if self.min_delta and self.patience is None:
            raise OptionError(f"stop.min_delta is {self.min_delta:g}, which has no effect without stop.patience")

    @property
    def reads_scores(self) -> bool:
        """Whether a condition reads scores on the clients' validation parts."""
        return self.patience is not None or self.target is not None


Table = Mapping[str, Any]
RECORDED = "config.toml"  # the config of a run folder
CODE = "code"  # the table of a recorded config with the digests of the user's own code


@dataclass(frozen=True)
class Config:
    """A complete experiment.

    Tables with fixed keys are dataclasses. The tables `method`, `data`, `split`, `model` and `sampling` name a function
    and hold its options.
    """

    method: Table
    data: Table = field(default_factory=lambda: {"name": "digits"})
    split: Table = field(default_factory=lambda: {"name": "dirichlet", "clients": 10, "alpha": 0.1})
    model: Table = field(default_factory=lambda: {"name": "vit"})
    sampling: Table = field(default_factory=lambda: {"name": "uniform"})
    seed: Annotated[Seed, "random seed for all draws"] = 0
    rounds: Annotated[int, Range(low=1, high=10**6), "number of rounds"] = 20
    label: Annotated[
        Text, "name of the run in tables; by default, the method with the options that are not defaults"
    ] = ""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    federation: FederationConfig = field(default_factory=FederationConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    privacy: PrivacyConfig | None = None
    secure_aggregation: SecureAggregation | None = None
    stop: StopConfig | None = None
    code: Mapping[str, str] = field(default_factory=dict)  # digest of each file or module of the user's own code

    @property
    def validation_every(self) -> int:
        """Rounds between evaluations on the clients' validation parts; 0 for never."""
        needed = self.stop is not None and self.stop.reads_scores
        return self.evaluate.validation_every or ((self.evaluate.every or 1) if needed else 0)

    def to_toml(self) -> str:
        """Return the config as TOML, without values that are None.

        It names own code by the copies in the folder `code` next to it; `references` of this config finds the files.
        """
        raw = portable(_drop_none(dataclasses.asdict(self)))
        return tomli_w.dumps({key: value for key, value in raw.items() if key != CODE or value})

    def references(self) -> list[Reference]:
        """Return the user's own functions that the config names."""
        return references_in(dataclasses.asdict(self))


NOT_THE_RUN = ("engine.", "track.", "data.memory")  # settings in which starts of the same run may differ
SITES_OWN = ("data", "engine")  # tables that a site may override; all others must match the server's


def shared_digest(config: Config) -> str:
    """Hash the part of the config on which the server and all sites must agree."""
    raw = tomllib.loads(config.to_toml())
    shared = {table: value for table, value in raw.items() if table not in (*SITES_OWN, "track")}
    shared["split"] = {key: value for key, value in shared["split"].items() if key != "client"}
    agreed = {reference.key for reference in references_in(shared)}  # a site may read its data with code of its own
    shared[CODE] = {key: digest for key, digest in raw.get(CODE, {}).items() if key in agreed}
    # Sites approve experiments by this digest, so nobody may be able to find two configs that share one.
    return hashlib.blake2b(json.dumps(shared, sort_keys=True).encode(), digest_size=16).hexdigest()


_TABLES = {
    "training": TrainingConfig,
    "federation": FederationConfig,
    "engine": EngineConfig,
    "evaluate": EvaluateConfig,
    "checkpoint": CheckpointConfig,
    "track": TrackConfig,
    "privacy": PrivacyConfig,
    "secure_aggregation": SecureAggregation,
    "stop": StopConfig,
}
# Tables that name a function: (key that holds the name, registry, parameters that do not come from the config).
_NAMED: dict[str, tuple[str, Mapping[str, str], tuple[str, ...]]] = {
    "method": ("name", methods.INDEX, ()),
    "data": ("name", data.INDEX, ("key",)),
    "split": ("name", data.SPLITS, ("task", "key")),
    "model": ("name", models.INDEX, ("task", "key")),
    "sampling": ("name", SAMPLING, ()),
}
# Tables in which all names share some options: the function that takes these, and its other parameters.
_SHARED: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "data": (data.load, ("name", "key", "together", "options")),
    "split": (data.split, ("task", "name", "clients", "key", "together", "options")),
    "model": (models.build, ("name", "task", "key", "options")),
}


def headings() -> list[str]:
    """Return the heading of every table: "" (top level), "training", ..., "method fedprox", "data text", ..."""
    named = [f"{table} {name}" for table, (_, index, _) in _NAMED.items() for name in index]
    place = 1 + max(place for place, heading in enumerate(named) if heading.startswith("model "))
    return ["", *_TABLES, *named[:place], ADAPTER_TABLE, *named[place:]]


def options_under(heading: str) -> dict[str, Option]:
    """Return the options of one table. This imports the function that the heading names, and no other.

    Args:
        heading: One of `headings`.
    """
    table, _, name = heading.partition(" ")
    if not table:
        return options_of(Config, given=[*_TABLES, *_NAMED, CODE])
    if table == ADAPTER_TABLE:
        return options_of(AdapterOptions)
    if table in _TABLES:
        return options_of(_TABLES[table])
    _, index, given = _NAMED[table]
    common = options_of(*_SHARED[table]) if table in _SHARED else {}
    return {**options_of(find_function(index, name, table), given), **common}


def schema() -> dict[str, dict[str, Option]]:
    """Return the options of every table by heading."""
    return {heading: options_under(heading) for heading in headings()}


def settings_by_key(config: Config) -> dict[str, str]:
    """Return every setting as a text by its dotted key. Values that mean the same have the same text."""
    texts: dict[str, str] = {}
    plain = _drop_none(dataclasses.asdict(config))
    for key, value in portable(plain).items():
        if isinstance(value, Mapping):
            known = _options_in(key, plain[key])
            if key == "model" and "adapter" in value:
                known, value = dict(known), dict(value)
                for name, item in value.pop("adapter").items():
                    value[f"adapter.{name}"] = item
                known |= {f"adapter.{name}": option for name, option in options_under(ADAPTER_TABLE).items()}
            hints = {name: known[name].hint if name in known else Any for name in value}
            texts |= {f"{key}.{name}": option_text(item, hints[name]) for name, item in value.items()}
        else:
            texts[key] = option_text(value)
    return texts


def _options_in(key: str, table: Table) -> Mapping[str, Option]:
    if key == CODE:
        return {}
    if key == "method":
        return method_options(table["name"])
    return options_under(key if key in _TABLES else f"{key} {table['name']}")


def differences(one: Config, other: Config) -> list[str]:
    """Say which settings differ and how, one text each. Starts of the same run may differ in the engine, the
    trackers and where the data is kept."""
    left, right = settings_by_key(one), settings_by_key(other)
    keys = [key for key in {**left, **right} if left.get(key) != right.get(key) and not key.startswith(NOT_THE_RUN)]
    return [_difference(key, left.get(key), right.get(key)) for key in keys]


def _difference(key: str, there: str | None, here: str | None) -> str:
    if key.startswith(f"{CODE}.") and there and here:
        return f"{changed(key.removeprefix(f'{CODE}.'))} since the run was started"
    return f"{key} is {there or 'not set'} there and {here or 'not set'} here"


def load_recorded(folder: Path, trust_code: bool = False, own_code: Mapping[str, str] | None = None) -> Config:
    """Load the config of a run folder. Code in the folder is run only if this user trusts it.

    Args:
        folder: The run folder.
        trust_code: Run its code in any case.
        own_code: Digests of code that the user runs anyway.

    Raises:
        CodeError: If the config names code that this user has not run on this machine.
    """
    raw = read_toml(folder / RECORDED)
    if not trust_code:
        check_trusted(references_in(anchored(raw, folder)), own_code)
    return parse(anchored(raw, folder))


def load(path: Path, changes: Iterable[str] = ()) -> Config:
    """Load and validate a config file.

    Args:
        path: The TOML file. Own code that it names is relative to its folder.
        changes: Overrides such as "method.mu=0.1". Own code that they name is relative to the current folder.

    Raises:
        ConfigError: If the file or an override cannot be read.
        OptionError: If a key is unknown or a value is invalid.
    """
    raw = anchored(read_toml(path), path.parent)
    for change in changes:
        apply_override(raw, change)
    return parse(raw)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file without checking its keys.

    Raises:
        ConfigError: If the file cannot be read, or is not TOML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the config {path}: it is not text in UTF-8") from error
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {_reason(error)}") from error


def apply_override(raw: dict[str, Any], change: str) -> None:
    """Apply an override to a raw config in place.

    Args:
        raw: The config as nested dicts.
        change: "key=value". Dots in the key separate tables. The value is TOML, or else a string.

    Raises:
        ConfigError: If the override cannot be read, or its key goes through something that is not a table.
    """
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"cannot read the override {format_value(change)}; write it as key=value, e.g. method.mu=0.1")
    *tables, last = key.strip().split(".")
    for name in tables:
        raw = raw.setdefault(name, {})
        if not isinstance(raw, dict):
            raise ConfigError(f"cannot set {format_value(key)}: {format_value(name)} is not a table")
    try:
        raw[last] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        raw[last] = text  # a bare word is a string: method.name=fedprox
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the override {format_value(change)}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def parse(raw: Mapping[str, Any]) -> Config:
    """Validate a raw config and fill in all defaults.

    Raises:
        OptionError: If a key is unknown or missing, or a value is invalid.
    """
    for key, value in raw.items():
        if key not in Config.__dataclass_fields__:
            raise unknown_key(key, Config.__dataclass_fields__)
        if (key in _TABLES or key in _NAMED) and not isinstance(value, Mapping):
            raise OptionError(f"{key} is {format_value(value)}; it must be a table, [{key}]")
    raw = anchored(raw, Path())
    recorded, code = raw.pop(CODE, None), code_digests(raw)
    if recorded is not None:
        check_recorded(recorded, code)
    if "method" not in raw:
        raise OptionError("'method' is missing; name one with [method] name = 'fedavg'")
    shaped = {key: kind(**validate_options(kind, raw[key], key)) for key, kind in _TABLES.items() if key in raw}
    plain = {key: value for key, value in raw.items() if key not in _TABLES}
    single = {key: value for key, value in plain.items() if key not in _NAMED}
    validate_options(Config, single, "", given=[*_TABLES, *_NAMED, CODE])
    config = Config(**plain, **shaped, code=code)
    config = dataclasses.replace(
        config,
        method=_filled_method(config.method),
        data=_filled(config.data, "data"),
        split=_filled(config.split, "split"),
        model=_filled(config.model, "model"),
        sampling=_filled(config.sampling, "sampling"),
    )
    config.training.build()
    return dataclasses.replace(config, label=config.label or method_label(config.method))


def _filled_method(table: Table) -> Table:
    """Fill in all defaults, so that the recorded config is complete."""
    name, options = _named(table, "method")
    methods.build(name, options)
    defaults = [_defaults(find_function(methods.INDEX, part, "method")) for part in name.split("+")]
    # A config cannot set a key that two composed methods share, so each method keeps its own default.
    own = {
        key: value for part in defaults for key, value in part.items() if sum(key in other for other in defaults) == 1
    }
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    return {"name": name, **own, **given}


def _filled(table: Table, where: str) -> Table:
    """Fill in the defaults of this name and of the keys that all names of the table share."""
    name, options = _named(table, where)
    _, index, given = _NAMED[where]
    function = find_function(index, name, where)
    if where not in _SHARED:
        return {"name": name, **_defaults(function), **validate_options(function, options, where, given, name)}
    shared_by, others = _SHARED[where]
    common = _defaults(shared_by)
    shared = {key: options.pop(key) for key in options_of(shared_by, others) if key in options}
    if where == "model" and "adapter" in shared:
        shared["adapter"] = _drop_none(dataclasses.asdict(adapter_options(shared["adapter"])))
    validate_options(shared_by, shared, where, others)
    own = validate_options(function, options, where, given, name, others=options_of(shared_by, others))
    return {"name": name, **common, **_defaults(function), **shared, **own}


def _named(table: Table, where: str) -> tuple[str, dict[str, Any]]:
    key, _, _ = _NAMED[where]
    if not isinstance(table.get(key), str):
        raise OptionError(f"'{where}.{key}' is missing; it names the {where} to use")
    return table[key], {other: value for other, value in table.items() if other != key}


def _defaults(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {
        option.name: option.default for option in parameters if option.default not in (inspect.Parameter.empty, None)
    }


def _drop_none(value: Any) -> Any:
    """Remove None values: TOML has no null."""
    if isinstance(value, Mapping):
        return {key: _drop_none(item) for key, item in value.items() if item is not None}
    return [_drop_none(item) for item in value] if isinstance(value, tuple | list) else value
