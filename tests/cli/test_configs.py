"""`partita init`, `partita data` and `partita options` as a user calls them, in an empty folder."""

from __future__ import annotations

import csv
import json
import sys
import tomllib
from pathlib import Path

import pytest
from shell import Shell

from partita import methods
from partita.core.rng import Key
from partita.data.synthetic_files import write_notes, write_pictures, write_scenes
from partita.experiment import runner
from partita.experiment.builder import build
from partita.experiment.config import headings, load
from partita.models.tiny_encoder import write_tiny_encoder
from partita.models.tiny_segformer import write_tiny_segformer

SECRET = "Jane Roe was seen for a broken heart, and the whole of this note must stay inside"


@pytest.fixture
def run_partita(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(monkeypatch, capsys)


def write_csv(file: Path, escape: str = "") -> Path:
    with file.open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["note", "diagnosis", "hospital"])
        for place in range(60):
            name = ("flu", f"co{escape}ld")[place % 2]
            table.writerow([f"{SECRET} {place}", name, ("north", "south")[place // 2 % 2]])
    return file


def make_encoder(folder: Path) -> Path:
    write_tiny_encoder(folder, SECRET.lower().replace(",", "").split(), Key(0), layers=1, width=8)
    return folder


# partita data


@pytest.mark.slow
def test_data_command_shows_columns_and_a_config_that_runs(run_partita: Shell, tmp_path: Path) -> None:
    write_csv(tmp_path / "notes.csv")
    make_encoder(tmp_path / "encoder")
    code, out, err = run_partita("data", "notes.csv", "--model", "encoder", "--json")
    assert (code, err) == (0, "")
    shown = json.loads(out)
    assert shown["roles"] == {"text": "note", "label": "diagnosis"}
    assert shown["tokens"][1] > 10
    (tmp_path / "found.toml").write_text(shown["toml"])
    assert load(tmp_path / "found.toml").data["max_length"] == 128
    [row] = runner.start(load(tmp_path / "found.toml", ["rounds=1"]), tmp_path / "run")
    assert sorted(row["cohort"]) == ["north", "south"]
    text = run_partita("data", "notes.csv", "--model", "encoder")[1]
    assert "task: text (text = 'note', label = 'diagnosis')" in text
    assert "2 classes: flu 30, cold 30" in text
    assert shown["toml"].splitlines()[0] in text


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", ["tokens", "images"])
def test_suggested_config_of_other_tasks_runs(kind: str, run_partita: Shell, tmp_path: Path) -> None:
    if kind == "tokens":
        write_notes(tmp_path / "d", Key(0), 80)
        make_encoder(tmp_path / "encoder")
    else:
        write_pictures(tmp_path / "d", Key(0), each=10)
    model = ["--model", "encoder"] if kind == "tokens" else []
    code, out, _ = run_partita("data", "d", *model, "--json")
    assert code == 0
    (tmp_path / "found.toml").write_text(json.loads(out)["toml"])
    [row] = runner.start(load(tmp_path / "found.toml", ["rounds=1"]), tmp_path / "run")
    assert row["test"]


@pytest.mark.slow
def test_data_command_shows_no_whole_record_and_escapes_control_characters(run_partita: Shell, tmp_path: Path) -> None:
    write_csv(tmp_path / "notes.csv", escape="\x1b[2J")
    _, out, _ = run_partita("data", "notes.csv")
    assert "Jane Roe was seen for a broken…" in out
    assert "whole of this note" not in out
    assert "\x1b" not in out
    assert "co\\x1b[2Jld" in out
    assert "cut at 30 characters; --no-values hides them" in out
    for words in (["data", "notes.csv", "--no-values"], ["data", "notes.csv", "--no-values", "--json"]):
        _, out, _ = run_partita(*words)
        assert "Jane" not in out
        assert "north" not in out
        assert "flu" not in out
    assert "2 classes: class 1 30, class 2 30" in run_partita("data", "notes.csv", "--no-values")[1]


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data", "note.csv"], "there is no file or folder 'note.csv'"),
        (["data", "notes.csv", "--label", "diagnose"], "has no column 'diagnose'; did you mean 'diagnosis'?"),
        (["init", "--data", "note.csv"], "there is no file or folder 'note.csv'"),
        (["init", "--method", "fedavgg"], "unknown method 'fedavgg'; did you mean 'fedavg'?"),
        (["init", "--example", "clinicl"], "there is no example 'clinicl'; did you mean 'clinical'?"),
        (["init", "--example", "digits", "--data", "x"], "--example and --data are both given; give one of them"),
        (["init", "--label", "x"], "--text, --label and --site are for your own data, not for 'digits'"),
        (["init", "--data", "notes.csv", "--model", "nowhere"], "cannot load the tokenizer 'nowhere'"),
        (["options", "trainin"], "there is no table 'trainin'; did you mean 'training'?"),
        (["options", "split.idd"], "unknown split 'idd'; did you mean 'iid'?"),
    ],
)
def test_mistakes_give_one_clear_line(words: list[str], message: str, run_partita: Shell, tmp_path: Path) -> None:
    write_csv(tmp_path / "notes.csv")
    code, _, err = run_partita(*words)
    assert code == 1
    [line] = [line for line in err.splitlines() if not line.startswith("note:")]
    assert message in line
    assert {path.name for path in tmp_path.iterdir()} == {"notes.csv"}, "nothing is written"


# partita init


@pytest.mark.slow
def test_init_fills_in_what_the_data_says_and_the_config_runs(run_partita: Shell, tmp_path: Path) -> None:
    write_csv(tmp_path / "notes.csv")
    make_encoder(tmp_path / "encoder")
    code, out, err = run_partita("init", "--data", "notes.csv", "--model", "encoder", "--method", "fedprox")
    assert (code, err) == (0, "")
    assert "found 60 train rows; task text: text = 'note', label = 'diagnosis', sites = 'hospital'" in out
    assert "partita plan --config experiment.toml" in out
    text = (tmp_path / "experiment.toml").read_text()
    raw = tomllib.loads(text)
    assert raw["data"] == {"name": "text", "path": "notes.csv", "text": "note", "label": "diagnosis", "max_length": 128}
    assert raw["split"] == {"name": "by_column", "column": "hospital"}
    keys = [line for line in text.splitlines() if " = " in line and not line.startswith("#")]
    assert len(keys) > 12
    assert all(len(line.partition("  # ")[2]) > 3 for line in keys), "each key has its meaning as a comment"
    assert run_partita("plan", "--config", "experiment.toml")[0] == 0
    assert run_partita("run", "--config", "experiment.toml", "--set", "rounds=1")[0] == 0
    code, _, err = run_partita("init", "--data", "notes.csv", "--model", "encoder")
    assert code == 1
    assert "experiment.toml exists already; move it away, or name another file with --out" in err
    assert (tmp_path / "experiment.toml").read_text() == text


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("method", [*methods.INDEX, "fedper+scaffold"])
def test_init_writes_a_config_that_can_be_built_for_every_method(
    method: str, run_partita: Shell, tmp_path: Path
) -> None:
    assert run_partita("init", "--data", "digits", "--clients", "2", "--method", method)[0] == 0
    build(load(tmp_path / "experiment.toml"))


def test_methods_for_sgd_are_those_that_refuse_adamw() -> None:
    refusing = [name for name in methods.INDEX if not methods.build(name).supports_optimizer("adamw")]
    assert sorted(refusing) == sorted(methods.NEEDS_SGD)


@pytest.mark.slow
def test_init_decays_the_rates_of_a_pretrained_image_model_and_the_config_runs(
    run_partita: Shell, tmp_path: Path
) -> None:
    write_scenes(tmp_path / "scenes", Key(0))
    write_tiny_segformer(tmp_path / "model", Key(0))
    given = ["--data", "scenes", "--model", "model", "--clients", "2"]
    for method, rate in {"fedavg": {"lr": 1e-4, "layer_decay": 0.75}, "lora": {"lr": 1e-3}}.items():
        assert run_partita("init", *given, "--method", method, "--out", f"{method}.toml")[0] == 0
        written = tomllib.loads((tmp_path / f"{method}.toml").read_text())["training"]
        assert written == {"optimizer": "adamw", **rate, "batch_size": 16, "epochs": 1}
        assert run_partita("run", "--config", f"{method}.toml", "--set", "rounds=1", "--set", "data.size=32")[0] == 0


@pytest.mark.slow
def test_init_without_answers_says_its_defaults_and_runs(run_partita: Shell, tmp_path: Path) -> None:
    code, _, err = run_partita("init", "--out", "mine.toml")
    assert code == 0
    assert err.splitlines() == [
        "note: --data is not given; using digits",
        "note: --clients is not given; using 4",
        "note: --method is not given; using fedavg",
    ]
    [row] = runner.start(load(tmp_path / "mine.toml", ["rounds=1"]), tmp_path / "run")
    assert len(row["cohort"]) == 4


def test_init_asks_on_a_terminal(run_partita: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_csv(tmp_path / "notes.csv")
    make_encoder(tmp_path / "encoder")
    answers = {"Data": "notes.csv", "Model": "encoder", "Method": "scaffold"}
    asked = []

    def prompt(question: str, default: str) -> str:
        asked.append((question.split(" ")[0], default))
        return answers[asked[-1][0]]

    monkeypatch.setattr("typer.prompt", prompt)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run_partita("init")[0] == 0
    assert asked == [("Data", "digits"), ("Model", "distilbert/distilbert-base-uncased"), ("Method", "fedavg")]
    config = load(tmp_path / "experiment.toml")
    assert (config.model["path"], config.method["name"]) == ("encoder", "scaffold")


@pytest.mark.slow
def test_init_writes_the_clinical_example(run_partita: Shell, tmp_path: Path) -> None:
    code, out, _ = run_partita("init", "--example", "clinical")
    assert code == 0
    assert out.startswith("wrote clinical.toml, notes, tiny-encoder\n")
    assert run_partita("plan", "--config", "clinical.toml")[0] == 0


# partita options


def test_options_command_explains_every_table(run_partita: Shell) -> None:
    out = run_partita("options")[1]
    for heading in headings():
        table, _, name = heading.partition(" ")
        assert table in out
        assert name in out
    _, out, _ = run_partita("options", "training")
    assert "lr: a number above 0 and up to 1e9; default 0.001" in out
    assert "learning rate" in out
    for words in ("split.iid", "split iid", "[split] iid"):
        _, out, _ = run_partita("options", words)
        assert "clients: a whole number from 1 to 1e9; must be given" in out
        assert "test: a number from 0 and below 1; default 0.2" in out
    _, out, _ = run_partita("options", "method.fedfrozen+fedprox", "--json")
    found = json.loads(out)
    assert list(found) == ["method.fedfrozen", "method.fedprox"]
    assert [key["name"] for key in found["method.fedprox"]] == ["mu"]
    assert all(key["meaning"] for keys in found.values() for key in keys)
