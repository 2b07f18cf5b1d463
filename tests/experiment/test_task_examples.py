"""The examples of chat, pairs of texts, sequence to sequence and segmentation run as they are, and learn."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from partita.core.rng import Key
from partita.data.synthetic_files import COUNTRIES, SCENE_CLASSES, SCHOOLS, write_scenes
from partita.experiment import runner, starter
from partita.experiment.config import load


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_statements_example_runs_and_every_hospital_has_all_answers(empty_folder: Path) -> None:
    written = starter.write_example("statements", Path("statements.toml"))
    assert [str(path) for path in written] == ["statements.toml", "statements", "tiny-encoder"]
    rows = [json.loads(line) for line in Path("statements/train.jsonl").read_text().splitlines()]
    for row in rows:
        sign = row["statement"].split()[-2]
        agree = ("no" in row["note"].split()) == ("free" in row["statement"])
        said = "says nothing of it" if sign == "given" else "entails" if agree else "contradicts"
        assert row["label"] == said
        assert sign == "given" or sign in row["note"]
    assert len({(row["hospital"], row["label"]) for row in rows}) == 12
    [row] = runner.start(load(Path("statements.toml"), ["rounds=1", "evaluate.every=1"]), Path("run"))
    assert row["test"]["accuracy"] > 0.2


@pytest.mark.slow
def test_dates_example_runs_and_its_targets_are_the_dates(empty_folder: Path) -> None:
    pytest.importorskip("rouge_score")
    starter.write_example("dates", Path("dates.toml"))
    rows = [json.loads(line) for line in Path("dates/train.jsonl").read_text().splitlines()]
    assert {row["country"] for row in rows} == set(COUNTRIES)
    for row in rows:
        day = row["target"].split()[1]
        assert f"{int(day):02}" in row["source"]
    few = ["rounds=1", "data.limit=60", "evaluate.every=1", "training.epochs=1"]
    [row] = runner.start(load(Path("dates.toml"), few), Path("run"))
    assert {"rougeL", "exact_match", "perplexity"} <= row["test"].keys()


@pytest.mark.slow
def test_scenes_example_runs_and_learns(empty_folder: Path) -> None:
    starter.write_example("scenes", Path("scenes.toml"))
    config = load(Path("scenes.toml"), ["rounds=2", "evaluate.every=1"])
    assert config.data["classes"] == SCENE_CLASSES
    rows = list(runner.start(config, Path("run")))
    assert rows[1]["test"]["loss"] < rows[0]["test"]["loss"]
    assert rows[1]["test"]["accuracy"] > 0.5


def test_scenes_depend_only_on_the_key_and_masks_lie_under_strokes(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("a", "b"):
        write_scenes(tmp_path / name, Key(1), scenes=6)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert all((tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in files)
    rows = list(csv.DictReader((tmp_path / "a" / "train.csv").read_text().splitlines()))
    assert len(rows) == 6
    for row in rows:
        pixels = np.asarray(image.open(tmp_path / "a" / row["image"]))[:, :, 0].astype(float)
        mask = np.asarray(image.open(tmp_path / "a" / row["mask"]))
        assert set(np.unique(mask)) <= {0, 1, 2}
        assert pixels[mask > 0].mean() > pixels[mask == 0].mean() + 20


@pytest.mark.slow
def test_chat_example_runs_and_every_answer_is_the_next_word(empty_folder: Path) -> None:
    starter.write_example("chat", Path("chat.toml"))
    rows = [json.loads(line) for line in Path("conversations/train.jsonl").read_text().splitlines()]
    assert {row["school"] for row in rows} == set(SCHOOLS)
    order = {word: words for words in SCHOOLS.values() for word in words}
    for row in rows:
        said = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        for text in said:
            told, _, side, known, _ = text.split()
            words = order[known]
            assert words[(words.index(known) + (1 if side == "after" else -1)) % len(words)] == told
        assert len(said) == 1 or said[1].split()[3] == said[0].split()[0]
    few = ["rounds=2", "evaluate.every=1", "training.epochs=1"]
    rows = list(runner.start(load(Path("chat.toml"), few), Path("run")))
    assert rows[1]["test"]["perplexity"] < rows[0]["test"]["perplexity"]
    assert "exact_match" in rows[1]["test"]
    assert len(json.loads(Path("run/samples.json").read_text())["samples"]) == 4
