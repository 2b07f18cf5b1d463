"""What trackers get of a row and of a config, and what they never get."""

from __future__ import annotations

import math
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita import track
from partita.core.options import OptionError
from partita.experiment.builder import build
from partita.experiment.compare import expand
from partita.experiment.config import parse
from partita.experiment.tracking import RowSender
from partita.record.metric import Metric
from partita.report.tables import worst_tenth
from partita.track import TRACKERS
from partita.track.scalars import Totals, clean, scalars, tables
from partita.track.settings import sent_settings

ROW = {
    "round": 3,
    "seconds": 1.5,
    "lr": 0.1,
    "train_loss": math.nan,
    "cohort": ["a", "b"],
    "population": 4,
    "lost": {"b": "timed out"},
    "bytes": {"up": 10, "down": 20},
    "up": {"a": 10},
    "drift": {"head": {"cosine": 0.5}, "query": None},
    "test": {"accuracy": 0.5, "loss": math.inf},
    "personal": {"accuracy": {"a": 0.25, "c": 0.75}, "loss": {"a": 1.0, "c": 3.0}},
    "validation": {"accuracy": 0.6},
    "by_type": {"DRUG/DOSE": {"f1": 0.4}},
    "subgroups": {"groups": {"f": {"accuracy": 0.1}}, "gap": 0.3},
    "privacy": {"epsilon": 2.0, "delta": 1e-5, "signal": {"x": 7.0}},
    "alarms": {"norm": "an update is long"},
    "skipped": True,
}


def test_scalars_are_the_finite_numbers_of_the_row() -> None:
    assert scalars(ROW, [Metric("loss", higher_is_better=False, fraction=False)]) == {
        "round": 3,
        "seconds": 1.5,
        "lr": 0.1,
        "test/accuracy": 0.5,
        "validation/accuracy": 0.6,
        "bytes/up": 10,
        "bytes/down": 20,
        "personal/accuracy/mean": 0.5,
        "personal/accuracy/worst_tenth": 0.25,
        "personal/loss/mean": 2.0,
        "personal/loss/worst_tenth": 3.0,
        "drift/head/cosine": 0.5,
        "by_type/DRUG_2f_DOSE/f1": 0.4,
        "subgroups/gap": 0.3,
        "subgroups/f/accuracy": 0.1,
        "privacy/epsilon": 2.0,
        "privacy/delta": 1e-5,
        "clients/sampled": 2,
        "clients/lost": 1,
        "alarm_count": 1,
        "skipped": 1,
    }
    assert scalars({"round": 0, "test": None, "personal": None, "drift": None, "bytes": None}) == {"round": 0}


def test_table_has_a_line_for_each_client_that_the_row_names() -> None:
    found = tables(ROW)
    assert found["clients"] == [
        {"client": "a", "sampled": True, "lost": None, "personal/accuracy": 0.25, "personal/loss": 1.0},
        {"client": "b", "sampled": True, "lost": "timed out", "personal/accuracy": None, "personal/loss": None},
        {"client": "c", "sampled": False, "lost": None, "personal/accuracy": 0.75, "personal/loss": 3.0},
    ]
    assert found["alarms"] == [{"alarm": "norm", "text": "an update is long"}]
    assert tables({"round": 0, "cohort": ["a"], "lost": {}}) == {}


def test_scalars_and_tables_never_share_a_name() -> None:
    assert not {"clients", "alarms"} & scalars(ROW).keys()


def test_totals_add_up() -> None:
    totals = Totals()
    totals.add(ROW)
    assert totals.add(ROW) == {"bytes/up_total": 20, "bytes/down_total": 40}
    assert totals.add({"round": 5, "bytes": None}) == {"bytes/up_total": 20, "bytes/down_total": 40}


@pytest.mark.slow
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=40), st.booleans())
def test_worst_tenth_is_that_of_the_report(values: list[float], higher: bool) -> None:
    row = {"round": 0, "personal": {"m": {str(place): value for place, value in enumerate(values)}}}
    found = scalars(row, [Metric("m", higher)])["personal/m/worst_tenth"]
    assert found == pytest.approx(worst_tenth(values, Metric("m", higher)))


@pytest.mark.slow
@given(st.lists(st.text(max_size=4), unique=True))
def test_cleaned_names_stay_different_and_are_plain(names: list[str]) -> None:
    plain = [name for name in names if "_" not in name]
    assert len({clean(name) for name in plain}) == len(plain)
    assert all(character.isascii() and character != "/" for name in names for character in clean(name))


CONFIG = {
    "label": "x",
    "seed": 1,
    "method": {"name": "code/mine.py:half", "table": {"a": 1}, "notes": "/home/ann/notes.txt"},
    "data": {"name": "text", "path": "patients/ann.csv", "tokenizer": "models/tok", "text": "note", "root": "x"},
    "model": {"name": "pretrained", "path": "/home/ann/models/bert-tiny", "adapter": {"kind": "lora", "rank": 4}},
    "engine": {"secret_file": "secret.bin", "threads": 2},
    "federation": {"availability_trace": "trace.csv"},
    "sampling": {"name": "available", "trace": "trace.csv"},
    "split": {"name": "site", "client": "ann", "options": {"a": ["C:\\data\\x"]}},
    "track": {"to": ["wandb"], "project": "p"},
    "code": {"mine.py": "abc"},
}


def test_secrets_and_paths_are_not_sent() -> None:
    assert sent_settings(CONFIG) == {
        "label": "x",
        "seed": 1,
        "method.name": "code/mine.py:half",
        "method.table": '{"a": 1}',
        "data.name": "text",
        "data.text": "note",
        "model.name": "pretrained",
        "model.path": "bert-tiny",
        "model.adapter.kind": "lora",
        "model.adapter.rank": 4,
        "engine.threads": 2,
        "sampling.name": "available",
        "split.name": "site",
    }


def test_client_level_privacy_keeps_clients_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.experiment.run_folder.verify", lambda folder: "identity")
    config = {"label": "x", "seed": 0, "privacy": {"unit": "client"}}
    sender = RowSender("wandb", config, tmp_path, [ROW])
    [(_, shown, found)] = sender.waiting
    assert found.keys() == {"alarms"}
    assert not [name for name in shown if name.startswith(("clients/", "personal/"))]
    assert "test/accuracy" in shown


def test_missing_library_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(track, "find_spec", lambda name: None if name == "wandb" else ModuleSpec(name, None))
    config = parse({"method": {"name": "fedavg"}, "data": {"name": "digits"}, "track": {"to": ["wandb"]}})
    with pytest.raises(OptionError, match=r"'wandb' needs wandb; install it with: pip install 'partita\[track\]'"):
        build(config)
    for name in TRACKERS:
        if name != "wandb":
            track.check_installed(name)


def test_unknown_tracker_is_refused() -> None:
    config = parse({"method": {"name": "fedavg"}, "track": {"to": ["tensorbord"]}})
    with pytest.raises(OptionError, match="unknown tracker 'tensorbord'; did you mean 'tensorboard'"):
        build(config)


def test_comparison_is_a_group(tmp_path: Path) -> None:
    config = tmp_path / "x.toml"
    config.write_text('method.name = "fedavg"\ntrack.to = ["tensorboard"]')
    [(_, settings)] = expand(config, [], "fedavg", 1, tmp_path / "six-methods")
    assert settings.track.group == "six-methods"
    [(_, settings)] = expand(config, ["track.group=mine"], "fedavg", 1, tmp_path / "six-methods")
    assert settings.track.group == "mine"
    [(_, settings)] = expand(config, ["track.to=[]"], "fedavg", 1, tmp_path / "six-methods")
    assert settings.track.group == ""
