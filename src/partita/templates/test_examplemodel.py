"""Tests of examplemodel. Run them with: python -m pytest test_examplemodel.py"""

from __future__ import annotations

import torch
from examplemodel import examplemodel

from partita import Key, Run, SimulationEngine, Training, data, methods, rounds

TASK = data.load("synthetic", Key(0), examples=60, classes=3)


def test_every_parameter_has_tags() -> None:
    model = examplemodel(TASK, Key(1))
    assert model.tags.keys() == model.initial.keys()
    assert model.names("head") == {"head.weight", "head.bias"}


def test_one_loss_for_each_example() -> None:
    model, batch = examplemodel(TASK, Key(1)), TASK.train.take(torch.arange(5))
    assert model.losses(model(model.initial, batch.inputs), batch.targets).shape == (5,)


def test_one_round_changes_all_parameters() -> None:
    model = examplemodel(TASK, Key(1), width=8)
    run = Run(methods.build("fedavg"), Training(lr=0.1, optimizer="sgd"), rounds=1, key=Key(2))
    federation = data.split(TASK, "iid", clients=3, key=Key(3))
    [result] = rounds(run, model, SimulationEngine(run, model, federation, block=3))
    after = result.server.params
    assert not any(torch.equal(after[name], value) for name, value in model.initial.items())
