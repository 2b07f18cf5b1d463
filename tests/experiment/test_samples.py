"""Samples of a run: test examples in full, with what the model says before and after training."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from partita.data.digits import read_digits
from partita.experiment import starter
from partita.experiment.config import load, parse
from partita.experiment.runner import start
from partita.experiment.samples import MAX_IMAGE, thumbnail
from partita.report import load_run

DIGITS: dict[str, Any] = {
    "method": {"name": "fedavg"},
    "data": {"name": "digits"},
    "model": {"name": "vit", "layers": 1, "width": 16, "heads": 2},
    "split": {"name": "iid", "clients": 3},
    "training": {"lr": 0.01},
    "rounds": 2,
    "evaluate": {"samples": 5},
}


def pixels_of(address: str) -> Image.Image:
    return Image.open(BytesIO(base64.b64decode(address.partition(",")[2])))


@pytest.mark.slow
def test_images_have_a_picture_a_label_and_two_predictions(tmp_path: Path) -> None:
    list(start(parse(DIGITS), tmp_path / "run"))
    samples = load_run(tmp_path / "run").samples
    assert len(samples) == 5
    for sample in samples:
        assert sample["prompt"] == ""
        assert sample["reference"] in map(str, range(10))
        assert pixels_of(sample["image"]).size == (8, 8)
        for said in (sample["before"], sample["after"]):
            label, _, sure = said.partition(" ")
            assert label in map(str, range(10))
            assert 0 <= int(sure.strip("(%)")) <= 100
    assert any(sample["before"] != sample["after"] for sample in samples)
    assert len({sample["image"] for sample in samples}) == 5, "they are spread over the test set"


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def samples_of_example(name: str, *changes: str) -> list[dict[str, str]]:
    starter.write_example(name, Path(f"{name}.toml"))
    config = load(Path(f"{name}.toml"), ["rounds=1", "evaluate.samples=4", "training.epochs=1", *changes])
    list(start(config, Path("run")))
    found: list[dict[str, str]] = json.loads(Path("run/samples.json").read_text())["samples"]
    assert len(found) == 4
    return found


@pytest.mark.slow
def test_pairs_show_both_texts_and_the_answer(empty_folder: Path) -> None:
    for sample in samples_of_example("statements"):
        note, _, statement = sample["prompt"].partition(" | ")
        assert note
        assert statement
        assert sample["reference"] in ("entails", "contradicts", "says nothing of it")
        assert sample["after"].partition(" (")[0] in ("entails", "contradicts", "says nothing of it")


@pytest.mark.slow
def test_tokens_show_the_entities_with_their_words(empty_folder: Path) -> None:
    for sample in samples_of_example("clinical"):
        assert sample["reference"] != ""
        for entity in sample["reference"].split("; "):
            if entity != "none":
                assert entity.partition(": ")[2] in sample["prompt"], "the words of an entity stand in the text"


def test_sample_images_are_small_and_show_the_pixels() -> None:
    noise = torch.rand(3, 224, 224, generator=torch.Generator().manual_seed(0))
    address = thumbnail(noise, ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)))
    assert len(address) < 4200
    assert len(base64.b64decode(address.partition(",")[2])) <= MAX_IMAGE
    pixels, _ = read_digits()
    shown = np.asarray(pixels_of(thumbnail(pixels[0], None)))
    assert np.array_equal(shown, np.round(pixels[0, 0].numpy() / 15 * 255)), "its brightest pixel is 15"
    gray = torch.full((1, 4, 6), 0.5)
    assert np.asarray(pixels_of(thumbnail(gray, ((0.25,), (0.5,))))).tolist() == [[128] * 6] * 4, "0.5 * 0.5 + 0.25"
