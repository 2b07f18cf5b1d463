"""The shipped examples run, with tiny data and models in place of the ones they name."""

from __future__ import annotations

from pathlib import Path

import dual_encoder_fixtures
import pytest
from example_fixtures import EXAMPLES, write_encoder, write_notes
from PIL import Image

from partita.experiment import runner
from partita.experiment.config import load


def write_images(folder: Path) -> Path:
    for place, name in enumerate(("cat", "dog")):
        (folder / "train" / name).mkdir(parents=True)
        for number in range(30):
            Image.new("L", (9, 9), 40 * place + number).save(folder / "train" / name / f"{number}.png")
    return folder


def test_clinical_example_runs(tmp_path: Path) -> None:
    paths = [f"data.path={write_notes(tmp_path / 'notes')}", f"model.path={write_encoder(tmp_path / 'model')}"]
    config = load(EXAMPLES / "clinical.toml", [*paths, "rounds=1", "method.k=2"])
    [row] = runner.start(config, tmp_path / "run")
    assert row["personal"]["f1"].keys() == {"north", "south"}
    assert all(len(layers) == 2 for layers in row["chosen"].values())


def test_clinical_example_runs_with_the_privacy_of_its_comment(tmp_path: Path) -> None:
    """With a budget that forty sentences can meet."""
    paths = [f"data.path={write_notes(tmp_path / 'notes')}", f"model.path={write_encoder(tmp_path / 'model')}"]
    said = (EXAMPLES / "clinical.toml").read_text()
    for setting in ("epsilon = 8.0", "noise = 8.0, probe = 0.5, every = 15"):
        assert setting in said
    noised = ["method.noise=8.0", "method.probe=0.5", "method.every=15", "privacy.epsilon=8.0"]
    [row] = runner.start(
        load(EXAMPLES / "clinical.toml", [*paths, *noised, "rounds=1", "method.k=2"]), tmp_path / "run"
    )
    assert 0 < row["privacy"]["epsilon"] <= 8.0


def test_prompts_example_runs_and_sends_only_global_prompts(tmp_path: Path) -> None:
    paths = [f"data.path={write_images(tmp_path / 'pictures')}", f"model.path={dual_encoder_fixtures.folder('clip')}"]
    tiny = ["data.size=8", "data.channels=1", "data.mean=[0.5]", "data.std=[0.5]", "model.dtype=float32"]
    small = ["split.clients=2", "method.text_tokens=2", "method.vision_tokens=2", "rounds=1"]
    [row] = runner.start(load(EXAMPLES / "prompts.toml", [*paths, *tiny, *small]), tmp_path / "run")
    assert set(row["up"]) - {""} == {name for name in row["up"] if "global" in name}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_is_a_valid_config(path: Path) -> None:
    assert load(path, []).rounds > 0
