"""Objects take the place of what the tables of a config would build."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from partita import data, models
from partita.core import tensors
from partita.core.rng import Key
from partita.core.rounds import rounds
from partita.core.settings import RunError
from partita.experiment.builder import build, build_engine
from partita.experiment.config import parse
from partita.experiment.experiment import Experiment
from partita.storage.client_store import MemoryStore

RAW: Mapping[str, Any] = {
    "method": {"name": "fedper"},
    "data": {"name": "synthetic", "examples": 60, "size": 4, "test_examples": 10},
    "split": {"name": "iid", "clients": 2},
    "model": {"name": "vit", "layers": 1, "width": 8, "heads": 2, "patch": 2},
    "training": {"lr": 0.1, "optimizer": "sgd", "batch_size": 16},
    "rounds": 1,
}


def digest_after_a_round(experiment: Experiment) -> str:
    [result] = rounds(experiment.run, experiment.model, build_engine(experiment, MemoryStore()))
    return tensors.digest(result.server.params)


def test_a_run_of_given_objects_is_the_run_that_the_config_names() -> None:
    config, key = parse(RAW), Key(0)
    task = data.load("synthetic", key / "data", examples=60, size=4, test_examples=10)
    model = models.build("vit", task, key / "model", layers=1, width=8, heads=2, patch=2)
    named = digest_after_a_round(build(config))
    assert digest_after_a_round(build(config, task=task)) == named
    assert digest_after_a_round(build(config, task=task, model=model)) == named
    other = models.build("vit", task, key / "another", layers=1, width=8, heads=2, patch=2)
    assert digest_after_a_round(build(config, task=task, model=other)) != named


def test_a_given_task_is_checked_like_a_loaded_one() -> None:
    task = data.load("synthetic", Key(0) / "data", examples=60, size=4, test_examples=10)
    with pytest.raises(RunError, match=r"training\.loss_average is 'tokens' and the task is of kind 'image'"):
        build(parse({**RAW, "training": {"loss_average": "tokens"}}), task=task)


def test_the_method_extends_a_given_model() -> None:
    config = parse({**RAW, "method": {"name": "apfl"}})
    named = build(config).model
    task = data.load("synthetic", Key(0) / "data", examples=60, size=4, test_examples=10)
    given = models.build("vit", task, Key(0) / "model", layers=1, width=8, heads=2, patch=2)
    assert build(config, task=task, model=given).model.initial.keys() == named.initial.keys()
    assert given.initial.keys() < named.initial.keys()
