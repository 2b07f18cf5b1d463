"""Layer selection in rows, alarms and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from partita.core.settings import RunError
from partita.experiment.config import parse
from partita.experiment.runner import resume, start
from partita.report import load_run, page
from partita.report.layer_selection import alarms_raised, overlap_between_rounds, pictures, shares

CONFIG: dict[str, Any] = {
    "rounds": 4,
    "data": {"name": "synthetic", "examples": 90, "size": 4, "channels": 1},
    "split": {"name": "iid", "clients": 3},
    "model": {"name": "vit", "layers": 3, "width": 8, "heads": 2, "patch": 2},
    "training": {"lr": 0.01, "steps": 1, "batch_size": 8},
    "evaluate": {"every": 4, "personal_every": 4},
    "method": {"name": "safl", "k": 1},
}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("choice") / "run"
    assert len(list(start(parse(CONFIG), folder))) == 4
    return folder


@pytest.mark.slow
def test_rows_record_selected_layers_and_scores(finished_run: Path) -> None:
    for row in map(json.loads, (finished_run / "rows.jsonl").read_text().splitlines()):
        assert row["chosen"].keys() == set(row["cohort"]) == row["scores"].keys()
        for client, [layer] in row["chosen"].items():
            scores = row["scores"][client]
            assert scores.keys() == {"layer.0", "layer.1", "layer.2"}
            assert scores[layer] == max(scores.values())
        senders = [f"layers.{number}." for number in range(3) if any(f"layers.{number}." in name for name in row["up"])]
        assert len(senders) == len({layer for chosen in row["chosen"].values() for layer in chosen})


def test_method_without_selection_records_no_selection_keys(tmp_path: Path) -> None:
    [row, *_] = start(parse({**CONFIG, "rounds": 1, "method": {"name": "fedavg"}}), tmp_path)
    assert not {"chosen", "scores", "alarms"} & row.keys()


@pytest.mark.parametrize("option", ["capacity", "depth"])
def test_option_for_a_missing_client_is_refused(option: str, tmp_path: Path) -> None:
    config = parse({**CONFIG, "method": {"name": "safl", option: {"c1": 1, "c9": 1}}})
    with pytest.raises(RunError, match="method names client 'c9', which does not exist"):
        next(start(config, tmp_path))


def test_report_shows_the_layer_selection(finished_run: Path, tmp_path: Path) -> None:
    record = load_run(finished_run)
    by_layer = shares([record])
    assert sorted(by_layer) == [0, 1, 2]
    for done in range(1, 5):
        assert sum(by[done] for by in by_layer.values()) == pytest.approx(1)  # each client sends one layer
    assert all(text.endswith("%") for text in overlap_between_rounds([record]))
    assert len(pictures([record])) == 1
    text = page([record], tmp_path / "page.html").read_text()
    assert "Choice of layers" in text
    assert 'id="layers"' in text


@pytest.mark.slow
def test_alarms_are_recorded_and_survive_a_resume(tmp_path: Path) -> None:
    """All layers have almost equal attention scores, which raises the alarm after three rounds."""
    config = parse({**CONFIG, "method": {"name": "safl", "k": 1, "tokens": "content"}, "rounds": 5})
    whole = list(start(config, tmp_path / "whole"))
    told = [row["alarms"] for row in whole]
    assert told[:2] == [{}, {}]
    assert told[2].keys() == told[4].keys() == {"attention collapse"}, told
    stopped = start(config, tmp_path / "stopped")
    for _ in range(3):
        next(stopped)
    stopped.close()
    assert [row["alarms"] for row in resume(config, tmp_path / "stopped")] == told[3:]
    [line] = alarms_raised([load_run(tmp_path / "whole")])
    assert line.startswith(
        "safl(k=1, tokens=content), attention collapse, seed 0 in rounds 3 to 5: no client's layer scores"
    )
    assert "method.tokens" in line
