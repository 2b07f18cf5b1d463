"""A config is strict: wrong keys and values are named, with a remedy, before any work starts."""

from __future__ import annotations

import inspect
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.core.dp_settings import PrivacySettings
from partita.core.optim import SGD, AdamW, Schedule
from partita.core.options import OptionError
from partita.core.rng import Key
from partita.core.sampling import Uniform
from partita.core.settings import FederationSettings, Run, Training
from partita.experiment.config import apply_override, load, parse
from partita.methods import COMPOSITIONS, INDEX, build
from partita.models.vit import vit

RUNNING: dict[str, Any] = {  # the tables that are what runs
    "training": Training,
    "federation": FederationSettings,
    "privacy": PrivacySettings,
}
SHIPPED = sorted([*Path("examples").glob("*.toml"), *Path("studies").rglob("*.toml")])
EXAMPLES = [path for path in SHIPPED if "arms" not in tomllib.loads(path.read_text())]  # the others list runs


def parse_with(*changes: str) -> object:
    raw = {"method": {"name": "fedavg"}}
    for change in changes:
        apply_override(raw, change)
    return parse(raw)


@pytest.mark.fast_cases(7)
@pytest.mark.parametrize("path", EXAMPLES, ids=str)
def test_every_shipped_config_loads(path: Path) -> None:
    config = load(path)
    assert parse(tomllib.loads(config.to_toml())) == config, "a resolved config resolves to itself"


@pytest.mark.fast_cases(14)
@pytest.mark.parametrize("name", [*INDEX, *COMPOSITIONS, "lora+feddyn"])
def test_config_of_every_method_resolves_to_itself(name: str) -> None:
    """Options may be lists, and two parts may use the same option name (the alpha of lora and feddyn)."""
    optimizer = "sgd" if build(name).supports_optimizer("sgd") else "adamw"
    config = parse({"method": {"name": name}, "training": {"optimizer": optimizer}})
    assert parse(tomllib.loads(config.to_toml())) == config


def test_shipped_configs_exist() -> None:
    assert EXAMPLES


def test_resolved_config_writes_defaults_out() -> None:
    text = parse({"method": {"name": "fedprox"}}).to_toml()
    assert tomllib.loads(text)["method"] == {"name": "fedprox", "mu": 0.01}
    assert tomllib.loads(text)["training"]["batch_size"] == 32


def test_seed_zero_is_kept() -> None:
    assert parse({"method": {"name": "fedavg"}, "seed": 0}).seed == 0


def test_composed_method_distributes_options_to_its_parts() -> None:
    config = parse({"method": {"name": "fedfrozen+fedprox", "mu": 0.5, "warmup": 3}})
    assert (config.method["mu"], config.method["warmup"], config.method["scope"]) == (0.5, 3, "rest")


def test_training_config_builds_its_optimizer() -> None:
    adam = parse({"method": {"name": "fedavg"}, "training": {"weight_decay": 0.2}}).training
    assert adam.steps_by == AdamW(weight_decay=0.2)
    plain = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.0}
    assert parse({"method": {"name": "fedavg"}, "training": plain}).training.steps_by == SGD(momentum=0.9)


@pytest.mark.parametrize(
    ("table", "optimizer"),
    [
        ({}, AdamW()),
        ({"optimizer": "adamw"}, AdamW()),
        ({"optimizer": "sgd"}, SGD()),
        ({"optimizer": "sgd", "momentum": 0.9, "nesterov": True}, SGD(0.9, nesterov=True)),
        ({"optimizer": "adamw", "weight_decay": 0.0}, AdamW(weight_decay=0.0)),
        ({"optimizer": "sgd", "weight_decay": 0.2}, SGD(weight_decay=0.2)),
    ],
)
def test_weight_decay_left_out_is_that_of_the_optimizer(table: dict[str, Any], optimizer: object) -> None:
    """Plain SGD is plain: torch.optim's own defaults, 0 for SGD and 0.01 for AdamW."""
    assert parse({"method": {"name": "fedavg"}, "training": table}).training.steps_by == optimizer
    theirs = torch.optim.AdamW if isinstance(optimizer, AdamW) else torch.optim.SGD
    default = theirs([torch.zeros(1)], lr=0.1).defaults["weight_decay"]
    if "weight_decay" not in table:
        assert optimizer.weight_decay == default  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, table in RUNNING.items() for key in table.__dataclass_fields__]
)
def test_python_and_config_refuse_a_value_in_the_same_words(name: str, key: str) -> None:
    with pytest.raises(OptionError, match=rf"{name}\.{key} is -1; it must be ") as in_python:
        RUNNING[name](**{key: -1})
    with pytest.raises(OptionError, match=re.escape(str(in_python.value))):
        parse({"method": {"name": "fedavg"}, name: {key: -1}})


@pytest.mark.parametrize(
    ("key", "value"), [("optimizer", SGD()), ("schedule", Schedule("cosine")), ("class_weights", (1.0, 2.0))]
)
def test_objects_in_place_of_names_are_for_python_only(key: str, value: Any) -> None:
    training, config = Training(**{key: value}), parse({"method": {"name": "fedavg"}})
    with pytest.raises(OptionError, match=rf"training\.{key} is .*; it must be ") as refused:
        replace(config, training=training)
    with pytest.raises(OptionError, match=re.escape(str(refused.value))):
        parse({"method": {"name": "fedavg"}, "training": {key: value}})


@pytest.mark.parametrize(("method", "cohort"), [("fedavg", 5), ("centralized", 1.0)])
def test_the_run_has_the_federation_of_the_config_and_asks_all_of_a_pooled_one(method: str, cohort: float) -> None:
    config = parse({"method": {"name": method}, "federation": {"cohort": 5, "max_norm": 2.0, "min_updates": 0}})
    run = config.run(build(method), Key(0), Uniform())
    assert run.federation == FederationSettings(cohort, max_norm=2.0, min_updates=0)


def test_python_and_config_have_the_same_defaults() -> None:
    config = parse({"method": {"name": "fedavg"}, "split": {"name": "iid", "clients": 3}})
    assert (config.training, config.federation) == (Training(), FederationSettings())
    private = parse({"method": {"name": "fedavg"}, "privacy": {"noise": 1.0}})
    assert (config.privacy, private.privacy) == (None, PrivacySettings(noise=1.0))
    run = Run(build("fedavg"), config.training, rounds=1, key=Key(0))
    assert (config.federation, config.evaluate.drift) == (run.federation, run.drift)
    options = inspect.signature(vit).parameters.items()
    assert config.model == {"name": "vit"} | {key: each.default for key, each in options if key not in ("task", "key")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "split={name='iid', clients=3, tset=0.1}",
            "'split.tset'; did you mean 'test'? It can be: test, shots, unseen, clients, reorder_size, orders, "
            "reorder, validation",
        ),
        ("method={name='fedfrozen+fedprox', my=1}", "'method.my'; did you mean 'mu'? It can be: mu, "),
        ("engine.cach_frozen=true", "did you mean 'cache_frozen'? It can be: cache_frozen, "),
        ("training.learningrate=1", "; 'partita options training' explains them"),
        ("model.wdth=3", "; 'partita options model.vit' explains them"),
        ("trainin.lr=1", "; 'partita options' explains them"),
        ("method={name='fednova', mu=1}", "unknown key 'method.mu'; there are no options here"),
        ("method.mu=1", "unknown key 'method.mu'; it can be: finetune"),
        ("method.name=fedavgg", "unknown method 'fedavgg'; did you mean 'fedavg'?"),
        ("method.name=3", "'method.name' is missing"),
        ("trainin.lr=1", "unknown key 'trainin'; did you mean 'training'?"),
        ("training.learning_rate=1", "unknown key 'training.learning_rate'"),
        ("training.batchsize=1", "did you mean 'batch_size'?"),
        ("training.lr=high", "training.lr is 'high'; it must be a number"),
        ("training.epochs=1.5", "training.epochs is 1.5; it must be a whole number"),
        ("training.epochs=true", "training.epochs is True; it must be a whole number"),
        ("training.lr=-1.0", "training.lr is -1.0; it must be a number above 0 and up to 1e9"),
        ("training.optimizer=adam", "it must be 'sgd' or 'adamw'"),
        ("training.momentum=0.9", "training.momentum and training.nesterov are for optimizer = 'sgd'"),
        ("training=1", "training is 1; it must be a table, [training]"),
        ("split.name=dirichlett", "unknown split 'dirichlett'; did you mean 'dirichlet'?"),
        ("split.beta=3", "unknown key 'split.beta'"),
        ("data.name=digit", "unknown data 'digit'; did you mean 'digits'?"),
        ("model.wdth=3", "unknown key 'model.wdth'; did you mean 'width'?"),
        (
            "engine.clients_per_block=many",
            "engine.clients_per_block is 'many'; it must be a whole number from 1 to 1e9 or 'auto'",
        ),
        ("seed=first", "seed is 'first'; it must be a whole number"),
    ],
)
def test_wrong_key_or_value_is_refused_with_a_hint(change: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_with("split={name='dirichlet', clients=4, alpha=1.0}", "model={name='vit'}", change)


@pytest.mark.parametrize("change", ["lr", "=3", "seed.x=1"])
def test_override_must_be_key_and_value(change: str) -> None:
    with pytest.raises(ValueError, match="cannot"):
        apply_override({"seed": 1}, change)


def test_missing_broken_or_empty_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the config"):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    with pytest.raises(ValueError, match="is not TOML"):
        load(tmp_path / "bad.toml")
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(ValueError, match="'method' is missing"):
        load(tmp_path / "empty.toml")
