"""Experiment configs in strict TOML. Each table is validated against the function or dataclass that consumes it."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from partita import data, methods, models
from partita.core.dp_settings import PrivacySettings
from partita.core.method import Method
from partita.core.options import (
    Option,
    OptionError,
    format_value,
    options_of,
    unknown_key,
    validate_options,
)
from partita.core.own_code import SUFFIX, Reference
from partita.core.registry import built_in, check_options, find_function, named, options_by_name
from partita.core.secure_settings import SecureAggregation
from partita.core.settings import FederationSettings, Training
from partita.data.dataset_files import check_place
from partita.data.other_data import DOCUMENTS
from partita.experiment import fits
from partita.experiment.config_code import (
    NAMED_TABLES,
    anchored,
    changed,
    check_recorded,
    code_digests,
    custom_code_in,
    portable,
    references_in,
)
from partita.experiment.config_tables import (
    CODE,
    OBJECTS,
    CheckpointConfig,
    Config,
    EngineConfig,
    EvaluateConfig,
    StopConfig,
    Table,
    TrackConfig,
    drop_none,
)
from partita.experiment.run_names import method_label, method_options, option_text
from partita.experiment.trusted_code import check_trusted
from partita.models.adapter_options import TABLE as ADAPTER_TABLE
from partita.models.adapter_options import AdapterOptions, adapter_options
from partita.models.from_task import check_path
from partita.record import file_names


class ConfigError(ValueError):
    """The config cannot be read."""


NOT_THE_RUN = ("engine.", "track.", "data.memory")  # settings in which starts of the same run may differ
HANDED_OVER = "trainers"  # the name of data and models that a script handed over, which no config can build
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


# What a program hands over. No file can say it.
IN_HAND = ("data object", "data trainer", "model module", "model trainer")
_TABLES = {
    "training": Training,
    "federation": FederationSettings,
    "engine": EngineConfig,
    "evaluate": EvaluateConfig,
    "checkpoint": CheckpointConfig,
    "track": TrackConfig,
    "privacy": PrivacySettings,
    "secure_aggregation": SecureAggregation,
    "stop": StopConfig,
}
# Tables in which all names share some options: the function that takes these, and its other parameters.
_SHARED: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "data": (data.load, ("name", "key", "together", "options")),
    "split": (data.split, ("task", "name", "clients", "key", "together", "options")),
    "model": (models.build, ("name", "task", "key", "options")),
}


def headings() -> list[str]:
    """Return the heading of every table: "" (top level), "training", ..., "method fedprox", "data text", ..."""
    names = [f"{table} {name}" for table in NAMED_TABLES for name in built_in(table)]
    names = [name for name in names if name not in IN_HAND]
    place = 1 + max(place for place, heading in enumerate(names) if heading.startswith("model "))
    return ["", *_TABLES, *names[:place], ADAPTER_TABLE, *names[place:]]


def options_under(heading: str) -> dict[str, Option]:
    """Return the options of one table. This imports the function that the heading names, and no other.

    Args:
        heading: One of `headings`.
    """
    table, _, name = heading.partition(" ")
    if not table:
        return options_of(Config, given=[*_TABLES, *NAMED_TABLES, CODE, OBJECTS])
    if table == ADAPTER_TABLE:
        return options_of(AdapterOptions)
    if table in _TABLES:
        return options_of(_TABLES[table])
    common = options_of(*_SHARED[table]) if table in _SHARED else {}
    return {**options_by_name(table, name), **common}


def schema() -> dict[str, dict[str, Option]]:
    """Return the options of every table by heading."""
    return {heading: options_under(heading) for heading in headings()}


def settings_by_key(config: Config) -> dict[str, str]:
    """Return every setting as a text by its dotted key. Values that mean the same have the same text."""
    texts: dict[str, str] = {}
    for key, value in portable(config.written()).items():
        if isinstance(value, Mapping):
            known = _options_in(key, getattr(config, key))
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
    raw = read_toml(folder / file_names.CONFIG)
    if not trust_code:
        check_trusted(references_in(anchored(raw, folder)), own_code)
    return parse(anchored(raw, folder))


def load(
    path: Path, changes: Iterable[str] = (), allow: Callable[[Sequence[Reference]], object] | None = None
) -> Config:
    """Load and validate a config file. This runs the code that it names.

    Args:
        path: The TOML file, or a Python file that calls `fit`. Own code that a TOML file names is relative to its
            folder.
        changes: Overrides such as "method.mu=0.1". Own code that they name is relative to the current folder.
        allow: Called with the custom code that the file names, before it runs; an error from it stops that. Names that
            packages register are not custom code. None for commands that run the config in any case.

    Raises:
        ConfigError: If the file or an override cannot be read.
        OptionError: If a key is unknown or a value is invalid.
    """
    if path.suffix == SUFFIX:
        if allow is not None:
            allow([Reference(os.path.abspath(path), "fit")])
        from partita.experiment.handing_over import read_python_file

        raw = anchored(read_python_file(path), Path())
    else:
        raw = anchored(read_toml(path), path.parent)
    named = set(custom_code_in(raw))
    for change in changes:
        apply_override(raw, change)
    if allow is not None:
        allow([reference for reference in custom_code_in(raw) if reference in named])
    return parse(raw)


def check_paths(config: Config) -> None:
    """Raise an error if the data or the model is at a path that does not exist."""
    for table, index, check in (
        (config.data, data.INDEX.keys() - {*DOCUMENTS}, check_place),
        (config.model, models.INDEX, check_path),
    ):
        if table["name"] in index and isinstance(path := table.get("path"), str):
            check(path)


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
        RunError: If settings do not go together.
        MethodError: If the method does not take a setting.
    """
    for key, value in raw.items():
        if key not in Config.__dataclass_fields__:
            raise unknown_key(key, Config.__dataclass_fields__)
        if (key in _TABLES or key in NAMED_TABLES) and not isinstance(value, Mapping):
            raise OptionError(f"{key} is {format_value(value)}; it must be a table, [{key}]")
    if isinstance(handed := raw.get("data"), Mapping) and handed.get("name") == HANDED_OVER:
        raise ConfigError(
            "the data and the model of this run are Trainers that a script handed to partita; run that script again, "
            "with resume = True to continue the run, and load its models there"
        )
    raw = anchored(raw, Path())
    recorded, code = raw.pop(CODE, None), code_digests(raw)
    if recorded is not None:
        check_recorded(recorded, code)
    objects: dict[str, Any] = {}
    if references_in({what: raw.get(what) for what in ("data", "model")}):
        from partita.experiment.handing_over import read_named_objects

        raw, objects = read_named_objects(raw)
    if "method" not in raw:
        raise OptionError("'method' is missing; name one with [method] name = 'fedavg'")
    shaped = {key: kind(**validate_options(kind, raw[key], key)) for key, kind in _TABLES.items() if key in raw}
    plain = {key: value for key, value in raw.items() if key not in _TABLES}
    single = {key: value for key, value in plain.items() if key not in NAMED_TABLES}
    validate_options(Config, single, "", given=[*_TABLES, *NAMED_TABLES, CODE, OBJECTS])
    config = Config(**plain, **shaped, code=code, objects=objects)
    method, built = _filled_method(config.method)
    config = dataclasses.replace(
        config,
        method=method,
        data=_filled(config.data, "data"),
        split=_filled(config.split, "split"),
        model=_filled(config.model, "model"),
        sampling=_filled(config.sampling, "sampling"),
    )
    fits.check(fits.Parts(config, built))
    return dataclasses.replace(config, label=config.label or method_label(config.method))


def _filled_method(table: Table) -> tuple[Table, Method]:
    """Fill in all defaults, so that the recorded config is complete. Return the method too."""
    name, options = _named(table, "method")
    method = methods.build(name, options)
    defaults = [_defaults(find_function("method", part)) for part in name.split("+")]
    # A config cannot set a key that two composed methods share, so each method keeps its own default.
    own = {
        key: value for part in defaults for key, value in part.items() if sum(key in other for other in defaults) == 1
    }
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    return {"name": name, **own, **given}, method


def _filled(table: Table, where: str) -> Table:
    """Fill in the defaults of this name and of the keys that all names of the table share."""
    name, options = _named(table, where)
    defaults = _defaults(find_function(where, name))
    if where not in _SHARED:
        return {"name": name, **defaults, **check_options(where, name, options)}
    shared_by, others = _SHARED[where]
    common = _defaults(shared_by)
    shared = {key: options.pop(key) for key in options_of(shared_by, others) if key in options}
    if where == "model" and "adapter" in shared:
        shared["adapter"] = drop_none(dataclasses.asdict(adapter_options(shared["adapter"])))
    validate_options(shared_by, shared, where, others)
    return {"name": name, **common, **defaults, **shared, **check_options(where, name, options)}


def _named(table: Table, where: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(table.get("name"), str):
        raise OptionError(f"'{where}.name' is missing; it names the {where} to use")
    return named(table)


def _defaults(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {
        option.name: option.default for option in parameters if option.default not in (inspect.Parameter.empty, None)
    }
