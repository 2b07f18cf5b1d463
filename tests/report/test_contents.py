"""Sections of the report on settings, classes, plans and single clients, on generated run folders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import CLIENTS, WARMUP, write_run
from test_report import parse_page

from partita.record.metric import ACCURACY
from partita.report import ReportError, RunRecord, load_run, page
from partita.report.client_pages import clients_data
from partita.report.confusion import MAX_CELLS, Matrix, confusion_data
from partita.report.load import settings
from partita.report.plan import MAX_COLUMNS, plan_picture, plans, status_of
from partita.report.settings_compared import compared_data

HOSTILE = "</script><script>alert(1)</script>"


# Settings


def test_settings_that_differ_are_listed_and_the_others_are_folded(tmp_path: Path) -> None:
    records = [load_run(write_run(tmp_path, label, 0, rounds=2)) for label in ("fedavg", "fedprox")]
    engines = {**records[1].config, "engine": {"name": "flower"}, "track": {"to": "wandb"}}
    records[1] = replace(records[1], config=engines)
    data = compared_data(records)
    assert data is not None
    assert [row for row in data["differing"].rows if row[0] != "method.name"] == [("method.mu", "–", "0.01")]
    assert {row[0] for row in data["computing"].rows} == {"engine.name", "track.to"}
    first = settings(records[0])
    assert dict(data["shared"].rows) == {
        key: value for key, value in first.items() if key not in ("method.name", "engine.name")
    }
    assert data["equal"] == f"All else is equal: {len(data['shared'].rows)} settings are shared."
    text = parse_page(page(records, tmp_path / "page.html").read_text()).text
    assert "What differed" in text
    assert "All else is equal" in text


def test_one_label_differs_from_nothing(tmp_path: Path) -> None:
    record = load_run(write_run(tmp_path, "fedavg", 0, rounds=2))
    assert compared_data([record]) is None
    data = compared_data([record, replace(record, label="again")])
    assert data is not None
    assert data["differing"] is None
    assert data["equal"].startswith("All ")
    assert data["equal"].endswith("settings are equal.")


# Confusion


def with_confusion(
    record: RunRecord, place: int, counts: Sequence[Sequence[int]], best: int | None = None
) -> RunRecord:
    rows = list(record.rows)
    rows[place] = {**rows[place], "confusion": {"classes": [f"k{n}" for n in range(len(counts))], "counts": counts}}
    return replace(record, rows=tuple(rows), best=best)


def test_confusion_is_summed_over_seeds(tmp_path: Path) -> None:
    records = [load_run(write_run(tmp_path, "fedavg", seed, rounds=3)) for seed in (0, 1)]
    records = [with_confusion(record, -1, [[3, 1], [0, 4]]) for record in records]
    data = confusion_data(records)
    assert data is not None
    [matrix] = data["matrices"]
    assert matrix.title == "fedavg: last test, 2 seeds together"
    assert matrix.counts == [[6, 2], [0, 8]]
    assert matrix.recalls == ["75", "100"]
    assert matrix.precisions == ["100", "80"]
    assert matrix.shades == [[8, 2], [0, 10]]
    assert matrix.worst == "Most often confused: k0 as k1 (2 of 8)."
    assert Matrix("", ["a", "b"], [[2, 0], [0, 0]]).recalls == ["100", "–"]


def test_confusion_of_the_best_round_is_shown_if_it_is_another_one(tmp_path: Path) -> None:
    record = with_confusion(load_run(write_run(tmp_path, "fedavg", 0, rounds=4)), -1, [[1, 0], [0, 1]])
    record = with_confusion(with_confusion(record, 0, [[0, 1], [1, 0]]), 1, [[1, 1], [0, 2]], best=2)
    data = confusion_data([record])
    assert data is not None
    assert [matrix.title for matrix in data["matrices"]] == [
        "fedavg: last test, one seed",
        "fedavg: best round on validation, one seed",
    ]
    assert data["matrices"][1].counts == [[1, 1], [0, 2]]
    folder = write_run(tmp_path, "fedprox", 0, rounds=4)
    (folder / "result.json").write_text(json.dumps({"rounds": 4, "best": {"after": 2}}))
    assert load_run(folder).best == 2


def test_confusion_that_would_make_the_page_too_large_is_left_out(tmp_path: Path) -> None:
    size = 50
    record = load_run(write_run(tmp_path, "fedavg", 0, rounds=2))
    many = [
        replace(with_confusion(record, -1, [[1] * size] * size), label=f"m{n}") for n in range(MAX_CELLS // size**2 + 2)
    ]
    data = confusion_data(many)
    assert data is not None
    assert len(data["matrices"]) == MAX_CELLS // size**2
    assert data["notes"] == [f"m{len(many) - 2}, m{len(many) - 1}: left out, because the page would be too large."]
    assert confusion_data([record]) is None


@pytest.mark.parametrize(
    "faulty", [{"classes": ["a"], "counts": [[1, 2]]}, {"classes": ["a"], "counts": []}, {"classes": ["a"]}, [1]]
)
def test_faulty_confusion_is_refused(faulty: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedavg", 0, rounds=2, edit=lambda row: {**row, "confusion": faulty})
    with pytest.raises(ReportError, match="confusion"):
        load_run(folder)


# Plan


def test_plan_picture_shows_what_freezes_when(tmp_path: Path) -> None:
    [plan] = plans([load_run(write_run(tmp_path, "fedfrozen", 0))])
    picture = plan_picture(plan)
    assert picture.grouped_by == "role"
    assert picture.columns == [f"1–{WARMUP}", f"{WARMUP + 1}–16"]
    statuses = {name: [cell.status for cell in cells] for name, cells in picture.rows}
    assert statuses["query"] == statuses["key"] == ["travels", "comes"]
    assert statuses["value"] == statuses["head"] == ["travels", "travels"]
    assert [name for name, _, _ in picture.legend] == ["travels", "comes"]
    text = parse_page(page([load_run(tmp_path / "fedfrozen-0")], tmp_path / "page.html").read_text()).text
    assert "frozen, comes down" in text, "also for readers who see no colors"


def test_plan_picture_shows_what_stays(tmp_path: Path) -> None:
    [plan] = plans([load_run(write_run(tmp_path, "fedper", 0))])
    statuses = {name: cells[0].status for name, cells in plan_picture(plan).rows}
    assert statuses["head"] == "stays"
    assert statuses["mlp"] == "travels"


def test_parameters_are_grouped_as_finely_as_needed(tmp_path: Path) -> None:
    record = load_run(write_run(tmp_path, "fedavg", 0, rounds=2))
    rows = [
        {**row, "trains": row["layer"] != "layer.1", "up": row["layer"] != "layer.1"} for row in record.plan[0]["rows"]
    ]
    [plan] = plans([replace(record, plan=({**record.plan[0], "rows": rows},))])
    picture = plan_picture(plan)
    assert picture.grouped_by == "layer"
    assert [name for name, _ in picture.rows] == ["outside the layers", "layer.0", "layer.1", "layer.2", "layer.3"]
    assert [cells[0].status for _, cells in picture.rows] == ["travels", "travels", "comes", "travels", "travels"]
    rows = [{**row, "trains": row["name"] != "blocks.1.key.weight"} for row in record.plan[0]["rows"]]
    [plan] = plans([replace(record, plan=({**record.plan[0], "rows": rows},))])
    assert plan_picture(plan).grouped_by == "layer and role"


def test_long_plans_are_cut_and_say_so(tmp_path: Path) -> None:
    record = load_run(write_run(tmp_path, "fedavg", 0, rounds=2))
    stages = tuple(
        {**record.plan[0], "first": n, "last": n, "rows": record.plan[0]["rows"][n % 2 :]}
        for n in range(MAX_COLUMNS + 5)
    )
    picture = plan_picture(plans([replace(record, plan=stages)])[0])
    assert len(picture.columns) == MAX_COLUMNS
    assert picture.left_out == "5 more stages"


def test_layers_that_clients_choose_show_how_often(tmp_path: Path) -> None:
    def choose(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "chosen": {client: ["layer.0"] for client in row["cohort"]}, "scores": {}}

    [plan] = plans([load_run(write_run(tmp_path, "safl", 0, rounds=2, edit=choose))])
    cells = dict(plan_picture(plan).rows)
    assert cells["layer.0"][0].meaning == "trains and travels, in 100% of the cases"
    assert cells["layer.1"][0].share == "0%"


@pytest.mark.parametrize(
    ("parameter", "status"),
    [
        ({"trains": True, "keep": True}, "stays"),
        ({"trains": True, "up": True, "down": True}, "travels"),
        ({"trains": True}, "alone"),
        ({"down": True}, "comes"),
        ({"keep": True}, "kept"),
        ({}, "frozen"),
    ],
)
def test_status_of_a_parameter(parameter: Mapping[str, bool], status: str) -> None:
    assert status_of(parameter) == status


# Clients


def client(data: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    assert data is not None
    return next(each for each in data["script"]["clients"]["list"] if each["name"] == name)


def test_client_has_its_scores_and_what_happened_to_it(tmp_path: Path) -> None:
    records = [load_run(write_run(tmp_path, label, seed)) for label in ("fedavg", "fedprox") for seed in (0, 1)]
    data = clients_data(records, ACCURACY)
    assert data is not None
    assert [each["name"] for each in data["script"]["clients"]["list"]] == [f"c{n}" for n in range(CLIENTS)]
    own = client(data, "c3")
    line = own["lines"][0]
    assert line["x"] == [5, 10, 15, 16]
    expected = sum(record.rows[-1]["personal"]["accuracy"]["c3"] for record in records[:2]) / 2
    assert line["y"][-1] == pytest.approx(100 * expected), "the mean over seeds, in percent"
    asked = sum("c3" in row["cohort"] for record in records[:2] for row in record.rows)
    assert own["rows"][0][:3] == ["fedavg", str(asked), "0"]
    [lost] = records[3].rows[4]["lost"]
    told = next(cells for cells in client(data, lost)["rows"] if cells[0] == "fedprox")
    assert told[2] == "1"
    assert told[5] == "loss is nan after 12 steps (round 5)"


def test_client_holds_and_chooses(tmp_path: Path) -> None:
    def choose(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "chosen": {name: ["layer.2", "layer.10"] for name in row["cohort"]}, "scores": {}}

    folder = write_run(tmp_path, "safl", 0, rounds=3, edit=choose)
    held = {"population": 9, "classes": ["a", "b"], "clients": [
        {"name": "c1", "train": 7, "validation": 1, "test": 2, "labels": [2, 5]}
    ]}  # fmt: skip
    (folder / "split.json").write_text(json.dumps(held))
    record = load_run(folder)
    data = clients_data([record], ACCURACY)
    asked = next(iter(record.rows[0]["cohort"]))
    times = sum(asked in row["cohort"] for row in record.rows)
    assert client(data, asked)["rows"][0][4] == f"2 ({times}), 10 ({times})"
    assert client(data, "c1")["holds"] == [
        "7 train, 1 validation, 2 test examples; labels in train: b (5), a (2) (seed 0)"
    ]


@pytest.mark.slow
def test_thousand_clients_stay_small(tmp_path: Path) -> None:
    names = [f"client-{n}" for n in range(1000)]

    def many(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "personal": {"accuracy": dict.fromkeys(names, 0.5)}, "cohort": names[:100]}

    records = [load_run(write_run(tmp_path, label, 0, edit=many)) for label in ("fedavg", "fedprox")]
    data = clients_data(records, ACCURACY)
    assert data is not None
    assert data["count"] == 1000
    assert page(records, tmp_path / "page.html").stat().st_size < 1_500_000


def test_rows_that_name_no_client_have_no_pages(tmp_path: Path) -> None:
    bare = write_run(tmp_path, "fedavg", 0, edit=lambda row: {"round": row["round"], "test": row["test"]})
    assert clients_data([load_run(bare)], ACCURACY) is None


# Untrusted names


def test_hostile_names_stay_text_everywhere(tmp_path: Path) -> None:
    def hostile(row: dict[str, Any]) -> dict[str, Any]:
        matrix = {"classes": [HOSTILE, "b"], "counts": [[1, 2], [3, 4]]}
        return {
            **row,
            "cohort": [HOSTILE],
            "lost": {HOSTILE: HOSTILE},
            "personal": {"accuracy": {HOSTILE: 0.5}},
            "confusion": matrix,
        }

    folders = [write_run(tmp_path, label, 0, rounds=2, edit=hostile) for label in ("fedavg", "fedprox")]
    for folder in folders:
        held = {"population": 1, "classes": [HOSTILE], "clients": [
            {"name": HOSTILE, "train": 7, "validation": 1, "test": 2, "labels": [7]}
        ]}  # fmt: skip
        (folder / "split.json").write_text(json.dumps(held))
        sample = dict.fromkeys(("prompt", "reference", "before", "after"), HOSTILE)
        (folder / "samples.json").write_text(json.dumps({"samples": [sample]}))
        plan = json.loads((folder / "plan.json").read_text())
        plan["stages"][0]["rows"][0]["role"] = HOSTILE
        (folder / "plan.json").write_text(json.dumps(plan))
        config = folder / "config.toml"
        config.write_text(config.read_text().replace('label = "', f'label = "{HOSTILE}').replace("cifar10", HOSTILE))
    text = page([load_run(folder) for folder in folders], tmp_path / "page.html").read_text()
    assert "<script>alert" not in text
    assert "alert(1)" in text
    for section in ("findings", "compared", "confusion", "samples", "split", "clients", "plan"):
        assert f'<section id="{section}"' in text


def test_sample_images_are_pictures_and_other_addresses_are_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedavg", 0, rounds=2)
    sample = {"prompt": "", "reference": "3", "before": "1 (20%)", "after": "3 (90%)"}
    (folder / "samples.json").write_text(json.dumps({"samples": [{**sample, "image": "data:image/png;base64,AAAA"}]}))
    text = page([load_run(folder)], tmp_path / "page.html").read_text()
    assert '<img class="sample" alt="test example 1, 3" src="data:image/png;base64,AAAA">' in text
    (folder / "samples.json").write_text(json.dumps({"samples": [{**sample, "image": "https://example.com/a.png"}]}))
    with pytest.raises(ReportError, match="a small PNG image"):
        load_run(folder)
