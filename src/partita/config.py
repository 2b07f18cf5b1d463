"""An experiment as strict TOML: every table is checked against the function or dataclass that will take it."""

from __future__ import annotations

import dataclasses
import inspect
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli_w

from partita import data, methods, models
from partita.core.optim import SGD, AdamW, Optimizer, Schedule
from partita.core.options import OptionError, bind, nearest, pick
from partita.core.run import Training
from partita.privacy.guard import Terms


class ConfigError(ValueError):
    """A config that cannot be read."""


@dataclass(frozen=True)
class TrainingConfig:
    lr: float = 1e-3
    optimizer: Literal["sgd", "adamw"] = "adamw"
    weight_decay: float = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    batch_size: int = 32
    epochs: int = 1
    steps: int | None = None
    clip: float | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    schedule: Literal["constant", "cosine", "linear", "step"] = "constant"
    schedule_warmup: int = 0
    schedule_floor: float = 0.0
    schedule_every: int = 10
    schedule_gamma: float = 0.1

    def build(self) -> Training:
        if self.optimizer == "adamw" and (self.momentum or self.nesterov):
            raise OptionError("training.momentum and training.nesterov are for optimizer = 'sgd'; leave them out")
        optimizer: Optimizer = AdamW(weight_decay=self.weight_decay)
        if self.optimizer == "sgd":
            optimizer = SGD(self.momentum, self.weight_decay, self.nesterov)
        schedule = Schedule(
            self.schedule, self.schedule_warmup, self.schedule_floor, self.schedule_every, self.schedule_gamma
        )
        return Training(
            self.lr, optimizer, schedule, self.batch_size, self.epochs, self.steps, self.clip, self.precision
        )


@dataclass(frozen=True)
class FederationConfig:
    cohort: int | float = 1.0
    dropout: float = 0.0
    straggle: float = 0.0
    trace: str | None = None
    minimum: int = 1
    tolerate: bool = False
    max_norm: float | None = None  # longer updates are scaled down to it
    max_examples: int = 10_000_000  # that a client of unknown size may claim
    preloaded: bool = False


@dataclass(frozen=True)
class EngineConfig:
    block: int | Literal["auto"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    workers: int = 1  # processes among which clients are shared out; on GPUs, one on each in turn
    state: Literal["memory", "disk"] = "memory"
    threads: int | None = None
    onednn: bool | Literal["auto"] = "auto"  # torch's kernels for CPUs
    deterministic: bool = True  # on a GPU: the same bits again, for some speed
    graphs: bool | Literal["auto"] = "auto"  # on a GPU: steps are recorded once and replayed; true: or it is an error
    compile: bool = False  # have torch compile the model: half a minute at first, and remembered on disk
    cache_frozen: bool = False  # compute once for each example what frozen layers, the lowest or a tower, make of it
    secret: str | None = None  # a file that only this machine can read: what is drawn for privacy is drawn by it


@dataclass(frozen=True)
class EvaluateConfig:
    every: int = 1  # rounds between tests on the central test set
    personal: int = 5  # rounds between tests on the clients' own test parts
    clients: int = 100  # at most, drawn once
    drift: bool = True


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 1


Table = Mapping[str, Any]


@dataclass(frozen=True)
class Config:
    """Tables of a fixed shape are dataclasses; those that name a function (a method, say) hold its options."""

    method: Table
    data: Table = field(default_factory=lambda: {"name": "digits"})
    split: Table = field(default_factory=lambda: {"kind": "dirichlet", "clients": 10, "alpha": 0.1})
    model: Table = field(default_factory=lambda: {"name": "vit"})
    seed: int = 0
    rounds: int = 20
    label: str = ""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    federation: FederationConfig = field(default_factory=FederationConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    privacy: Terms | None = None

    def to_toml(self) -> str:
        return tomli_w.dumps(_drop_none(dataclasses.asdict(self)))


_TABLES = {
    "training": TrainingConfig,
    "federation": FederationConfig,
    "engine": EngineConfig,
    "evaluate": EvaluateConfig,
    "checkpoint": CheckpointConfig,
    "privacy": Terms,
}


def load(path: Path, changes: Iterable[str] = ()) -> Config:
    """The config in a file, with changes such as "method.mu=0.1" laid over it."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for change in changes:
        overlay(raw, change)
    return parse(raw)


def overlay(raw: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"cannot read the change '{change}'; write it as key=value, for instance method.mu=0.1")
    *tables, last = key.strip().split(".")
    for name in tables:
        raw = raw.setdefault(name, {})
        if not isinstance(raw, dict):
            raise ConfigError(f"cannot set '{key}': '{name}' is not a table")
    try:
        raw[last] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        raw[last] = text  # a bare word is a text: method.name=fedprox


def parse(raw: Mapping[str, Any]) -> Config:
    """Checked as a whole before any work starts."""
    for key, value in raw.items():
        if key in _TABLES and not isinstance(value, Mapping):
            raise OptionError(f"{key} is {value!r}; it must be a table, [{key}]")
        if key not in Config.__dataclass_fields__:
            raise OptionError(f"unknown key '{key}'; {nearest(key, Config.__dataclass_fields__)}")
    shaped = {key: kind(**bind(kind, raw[key], key)) for key, kind in _TABLES.items() if key in raw}
    plain = {key: value for key, value in raw.items() if key not in _TABLES}
    if "method" not in plain:
        raise OptionError("'method' is missing; say which with [method] name = 'fedavg'")
    try:
        bind(Config, plain, "config", given=_TABLES)
    except OptionError as error:
        raise OptionError(str(error).replace("config.", "")) from None
    config = Config(**plain, **shaped)
    config = dataclasses.replace(
        config,
        method=_filled_method(config.method),
        data=_filled(config.data, "data", data.INDEX, given=["key"]),
        split=_filled_split(config.split),
        model=_filled(config.model, "model", models.INDEX, given=["task", "key"]),
    )
    config.training.build()
    return dataclasses.replace(config, label=config.label or config.method["name"])


def _filled_method(table: Table) -> Table:
    """With all defaults, so that the recorded config says what was run."""
    name, options = _named(table, "method", "name")
    methods.build(name, options)
    found = [_defaults(pick(methods.INDEX, part, "method")) for part in name.split("+")]
    # A key that two parts share cannot be said in a config, so each keeps its own default.
    own = {key: value for part in found for key, value in part.items() if sum(key in other for other in found) == 1}
    said = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    return {"name": name, **own, **said}


def _filled(table: Table, where: str, index: Mapping[str, str], given: list[str]) -> Table:
    name, options = _named(table, where, "name")
    function = pick(index, name, where)
    return {"name": name, **_defaults(function), **bind(function, options, where, given)}


def _filled_split(table: Table) -> Table:
    """Some keys are for this kind of split, others for every kind."""
    kind, options = _named(table, "split", "kind")
    function = pick(data.SPLITS, kind, "split")
    common = _defaults(data.split)
    cuts = {key: options.pop(key) for key in common if key in options}
    bind(data.split, cuts, "split", given=["task", "kind", "clients", "key", "options"])
    own = bind(function, options, "split", given=["task", "key"])
    return {"kind": kind, **common, **_defaults(function), **cuts, **own}


def _named(table: Table, where: str, key: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(table.get(key), str):
        raise OptionError(f"'{where}.{key}' is missing; it says which {where} to use")
    return table[key], {other: value for other, value in table.items() if other != key}


def _defaults(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.default not in (inspect.Parameter.empty, None)}


def _drop_none(value: Any) -> Any:
    """TOML has no null: what is left out is None."""
    if isinstance(value, Mapping):
        return {key: _drop_none(each) for key, each in value.items() if each is not None}
    return [_drop_none(each) for each in value] if isinstance(value, tuple | list) else value
