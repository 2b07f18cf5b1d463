"""An object that a program changes after it handed it over is not the object of the run any more."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_fixtures import bert

import partita as pt
from partita.core.given import unchanged
from partita.core.rng import Key, seeded
from partita.data.objects import from_task


def rows() -> list[tuple[torch.Tensor, int]]:
    draw = Key(0).generator()
    return [(value, int(value[0] > 0)) for value in torch.randn(12, 4, generator=draw)]


def module() -> torch.nn.Module:
    with seeded(Key(1)):
        return torch.nn.Linear(4, 2)


def fit(model: Any, folder: Path, data: Any = None) -> pt.Fitted:
    data = pt.from_dataset(rows()).split("iid", clients=2) if data is None else data
    return pt.fit(model, data, rounds=1, lr=0.1, folder=folder, progress=False, engine={"clients_per_block": 1})


def test_a_module_that_was_trained_in_place_is_refused(tmp_path: Path) -> None:
    model = module()
    run = fit(model, tmp_path / "run")
    run.model()
    with torch.no_grad():
        model.weight += 1  # type: ignore[operator]
    for use in (run.model, lambda: run.resume(rounds=2), lambda: run.export(tmp_path / "model")):
        with pytest.raises(ValueError, match=r"has changed 'object:\w+' since it handed it over.*; hand over a copy"):
            use()  # type: ignore[operator]
    again = pt.load_run(run.folder, model=module(), data=pt.from_dataset(rows()))
    assert again.resume(rounds=2).scores, "an equal module takes the place of the changed one"
    assert run.model() is not None


def test_a_copy_stays_as_it_was(tmp_path: Path) -> None:
    model = module()
    run = fit(copy.deepcopy(model), tmp_path / "run")
    with torch.no_grad():
        model.weight += 1  # type: ignore[operator]
    assert run.resume(rounds=2).finished


def test_rows_that_were_changed_in_place_are_refused() -> None:
    task = pt.from_dataset(rows()).task()
    source = from_task(task)
    name = str(source.reading["path"])
    assert unchanged(name) is task
    task.train.targets[0] += 1  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="has changed"):
        source.task()


def test_a_module_of_transformers_is_compared_too() -> None:
    from partita.models.given_model import hand_over_model

    model = bert()
    held = hand_over_model(model)
    assert unchanged(held.name) is model
    with torch.no_grad():
        model.classifier.bias += 1
    with pytest.raises(ValueError, match="has changed"):
        unchanged(held.name)
