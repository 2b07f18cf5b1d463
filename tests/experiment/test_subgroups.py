"""Scores of subgroups of the central test set."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import SMALL_TASK, SMALL_VIT
from report_fixtures import write_run

from partita.core.options import OptionError
from partita.core.rng import Key
from partita.data import Task, load
from partita.engines.flower.message_checks import valid_scores
from partita.evaluation.evaluator import type_score
from partita.evaluation.metrics import Entities
from partita.experiment.config import parse
from partita.experiment.runner import start
from partita.experiment.subgroups import MISSING, find_groups, score_groups
from partita.record.metric import Metric
from partita.report import load_run, page


def small_task(values: list[str]) -> Task:
    task = load("synthetic", Key(0), examples=20, test_examples=len(values), size=4)
    return replace(task, test_columns={"sex": np.array(values)})


def config(method: str = "fedavg", **evaluate: Any) -> dict[str, Any]:
    raw = tomllib.loads(SMALL_TASK + SMALL_VIT)
    raw["data"] |= {"domains": 2, "test_examples": 51}
    return {**raw, "method": {"name": method}, "rounds": 1, "evaluate": {"subgroups": "domain", **evaluate}}


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_the_scores_of_the_groups_average_to_the_score_of_all(method: str, tmp_path: Path) -> None:
    [row] = start(parse(config(method, subgroup_min=10)), tmp_path / "run")
    groups = row["subgroups"]["groups"]
    assert {name: own["examples"] for name, own in groups.items()} == {"domain0": 26, "domain1": 25}
    weighted = sum(own["examples"] * own["value"] for own in groups.values()) / 51
    assert weighted == pytest.approx(row["test"]["accuracy"])
    assert row["subgroups"]["gap"] == pytest.approx(abs(groups["domain0"]["value"] - groups["domain1"]["value"]))


def test_small_groups_do_not_count_for_the_gap() -> None:
    groups = find_groups(small_task(["f"] * 6 + ["m"] * 5 + ["x"]), "sex")
    accuracy = {6: 0.9, 5: 0.7, 1: 0.0}

    def scores(examples: Any) -> dict[str, float]:
        return {"accuracy": accuracy[len(examples)]}

    found = score_groups(groups, None, Metric("accuracy"), 5, scores)
    assert found["gap"] == pytest.approx(0.2)
    assert found["groups"]["x"] == {"examples": 1, "value": 0.0}
    assert "gap" not in score_groups(groups, None, Metric("accuracy"), 6, scores)
    undefined = score_groups(groups, None, Metric("f1"), 1, scores)
    assert undefined["groups"] == {name: {"examples": count} for name, count in (("f", 6), ("m", 5), ("x", 1))}


def test_groups_cover_the_test_rows() -> None:
    groups = find_groups(small_task(["f", "", "m", "f"]), "sex")
    assert {name: rows.tolist() for name, rows in groups.items()} == {MISSING: [1], "f": [0, 3], "m": [2]}


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("sexe", ["f", "m"], "'sexe', but the test rows have no such column; did you mean 'sex'"),
        ("sex", ["f", "f"], "has 1 different values"),
        (
            "sex",
            [str(age) for age in range(60)],
            "has 60 different values in the test rows; name a column with 2 to 50",
        ),
    ],
)
def test_columns_that_make_no_groups_are_refused(column: str, values: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        find_groups(small_task(values), column)


def test_scores_of_entity_types_do_not_leave_a_site() -> None:
    scores = {"f1": 0.5, type_score("f1", "Drug"): 0.4, type_score("entities", "Drug"): 3}
    assert valid_scores(scores, Entities(("O", "B-Drug"))) == {"f1": 0.5}


def test_the_report_shows_types_and_subgroups(tmp_path: Path) -> None:
    def edit(row: dict[str, Any]) -> dict[str, Any]:
        types = {"Drug": {"entities": 7, "precision": 0.5, "recall": 0.25, "f1": 1 / 3, "relaxed_f1": 0.625}}
        groups = {"f": {"examples": 40, "value": 0.75}, "<m>": {"examples": 9, "value": 0.5}}
        return {**row, "by_type": types, "subgroups": {"groups": groups, "gap": 0.125, "minimum": 30}}

    folder = write_run(tmp_path, "fedavg", 0, rounds=2, edit=edit)
    path = folder / "config.toml"
    path.write_text(path.read_text() + 'subgroups = "sex"\n')
    text = page([load_run(folder)], tmp_path / "page.html").read_text()
    cells = "".join(f"<td>{cell}</td>" for cell in ("fedavg", "7", "50.0", "25.0", "33.3", "62.5"))
    assert f'<tr><th scope="row">Drug</th>{cells}</tr>' in text
    for name, *rest in (("f", "40", "75.0"), ("&lt;m&gt; *", "9", "50.0"), ("gap", "", "12.5")):
        assert f'<th scope="row">{name}</th>' + "".join(f"<td>{cell}</td>" for cell in rest) in text
    plain = write_run(tmp_path / "plain", "fedavg", 0, rounds=2)
    assert "Scores in detail" not in page([load_run(plain)], tmp_path / "plain.html").read_text()
