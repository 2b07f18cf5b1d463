"""Confusion matrices, against scikit-learn, and as an evaluation counts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics
from test_one_class import Echo

from partita.core.model import Model
from partita.data import Table
from partita.evaluation import evaluate
from partita.evaluation.confusion import confusion_matrix
from partita.experiment.config import parse
from partita.experiment.runner import start
from partita.report import load_run


@pytest.mark.slow
@given(st.integers(2, 7).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.tuples(*[st.integers(0, n - 1)] * 2)))))
def test_matrix_is_that_of_scikit_learn(drawn: tuple[int, list[tuple[int, int]]]) -> None:
    classes, pairs = drawn
    predicted, labels = (torch.tensor([pair[side] for pair in pairs], dtype=torch.long) for side in (0, 1))
    counts = confusion_matrix(predicted, labels, classes)
    assert counts.shape == (classes, classes)
    assert counts.sum() == len(pairs)
    if pairs:
        expected = metrics.confusion_matrix(labels.numpy(), predicted.numpy(), labels=range(classes))
        assert counts.tolist() == expected.tolist()


CONFIG: dict[str, Any] = {
    "method": {"name": "fedavg"},
    "data": {"name": "synthetic", "examples": 120, "size": 4, "test_examples": 30},
    "split": {"name": "iid", "clients": 3},
    "model": {"name": "vit", "layers": 1, "width": 8, "heads": 2, "patch": 2},
    "training": {"lr": 0.01, "batch_size": 16},
    "rounds": 3,
}


def rows(folder: Path, **more: Any) -> list[dict[str, Any]]:
    return list(start(parse({**CONFIG, **more}), folder))


@pytest.mark.slow
def test_last_test_records_which_class_is_taken_for_which(tmp_path: Path) -> None:
    *earlier, last = rows(tmp_path / "run")
    assert all("confusion" not in row for row in earlier)
    counts = torch.tensor(last["confusion"]["counts"])
    assert counts.sum() == 30
    assert counts.trace() / 30 == pytest.approx(last["test"]["accuracy"])
    assert len(last["confusion"]["classes"]) == len(counts)
    assert load_run(tmp_path / "run").rows[-1]["confusion"] == last["confusion"]


@pytest.mark.slow
def test_best_round_on_validation_records_it_too(tmp_path: Path) -> None:
    found = rows(tmp_path / "run", evaluate={"validation_every": 1}, training={"lr": 0.5, "batch_size": 16})
    best = json.loads((tmp_path / "run" / "result.json").read_text())["best"]["after"]
    assert "confusion" in found[best - 1]
    assert "confusion" in found[-1]


@pytest.mark.slow
def test_clients_own_models_and_many_classes_have_none(tmp_path: Path) -> None:
    assert "confusion" not in rows(tmp_path / "own", method={"name": "fedper"})[-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("partita.experiment.round_log.MAX_CONFUSED", 2)
        assert "confusion" not in rows(tmp_path / "many")[-1]


def test_outputs_beyond_the_classes_are_not_counted() -> None:
    logits = torch.eye(4)[[0, 1, 1, 0, 3, 3]]
    table = Table({"logits": logits}, torch.tensor([0, 1, 2, 0, 1, -100]))
    model, params = cast(Model, Echo()), {"w": torch.zeros(1)}
    assert evaluate(model, params, table, confused=3).confusion is None
    assert evaluate(model, params, table, confused=4).confusion == [
        [2, 0, 0, 0], [0, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]
    ]  # fmt: skip
    assert evaluate(model, params, table).confusion is None
