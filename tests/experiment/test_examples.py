"""The shipped examples run as they are, after `partita init --example` in an empty folder."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
from example_fixtures import EXAMPLES

from partita.experiment import runner, starter
from partita.experiment.config import ConfigError, load
from partita.experiment.preview import preview

NAMES = sorted(path.stem for path in EXAMPLES.glob("*.toml"))


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_clinical_example_runs_as_it_is(empty_folder: Path) -> None:
    written = starter.write_example("clinical", Path("clinical.toml"))
    assert [str(path) for path in written] == ["clinical.toml", "notes", "tiny-encoder"]
    shown = preview(load(Path("clinical.toml")), 0, None)
    assert "This table draws the layers at random; in a run, the client chooses as many" in shown.to_text()
    rows = list(runner.start(load(Path("clinical.toml"), ["rounds=10"]), Path("run")))
    assert rows[4]["personal"]["f1"].keys() == {"east", "north", "south", "west"}
    assert all(len(layers) == 2 for layers in rows[-1]["chosen"].values())
    assert shown.bytes_up == pytest.approx(rows[0]["bytes"]["up"] / 4, rel=0.01), "layers differ only in their names"
    assert rows[9]["test"]["f1"] > 0.5, "the entities of the synthetic notes can be learned"


@pytest.mark.slow
def test_clinical_example_runs_with_the_privacy_of_its_comment(empty_folder: Path) -> None:
    starter.write_example("clinical", Path("clinical.toml"))
    said = Path("clinical.toml").read_text()
    for setting in ("epsilon = 8.0", "noise = 8.0, probe = 0.5, every = 15"):
        assert setting in said
    noised = ["method.noise=8.0", "method.probe=0.5", "method.every=15", "privacy.epsilon=8.0"]
    assert preview(load(Path("clinical.toml"), noised), 0, None).drawn
    [row] = runner.start(load(Path("clinical.toml"), [*noised, "rounds=1"]), Path("run"))
    assert 0 < row["privacy"]["epsilon"] <= 8.0


@pytest.mark.slow
def test_prompts_example_runs_and_sends_only_global_prompts(empty_folder: Path) -> None:
    starter.write_example("prompts", Path("prompts.toml"))
    [row] = runner.start(load(Path("prompts.toml"), ["rounds=1"]), Path("run"))
    assert set(row["up"]) - {""} == {name for name in row["up"] if "global" in name}


def test_synthetic_notes_depend_only_on_the_seed(empty_folder: Path) -> None:
    starter.write_example("clinical", Path("a.toml"))
    first = Path("notes/train.jsonl").read_bytes()
    weights = Path("tiny-encoder/model.safetensors").read_bytes()
    for name in ("notes", "tiny-encoder"):
        Path(name).rename(f"{name}-old")
    starter.write_example("clinical", Path("b.toml"))
    assert Path("notes/train.jsonl").read_bytes() == first
    assert Path("tiny-encoder/model.safetensors").read_bytes() == weights
    rows = [json.loads(line) for line in first.splitlines()]
    assert len({row["hospital"] for row in rows}) == 4
    assert all(len(row["tokens"]) == len(row["tags"]) for row in rows)


@pytest.mark.parametrize("existing", ["clinical.toml", "notes", "tiny-encoder"])
def test_example_overwrites_nothing(existing: str, empty_folder: Path) -> None:
    Path(existing).mkdir()
    with pytest.raises(ConfigError, match=f"{existing} exists already; move it away"):
        starter.write_example("clinical", Path("clinical.toml"))
    assert [path.name for path in empty_folder.iterdir()] == [existing]


@pytest.mark.parametrize("name", NAMES)
def test_every_example_is_shipped_and_a_valid_config(name: str) -> None:
    assert load(EXAMPLES / f"{name}.toml", []).rounds > 0
    shipped = files("partita").joinpath("examples", f"{name}.toml").read_text(encoding="utf-8")
    assert shipped == (EXAMPLES / f"{name}.toml").read_text(encoding="utf-8")
    assert set(NAMES) == set(starter.EXAMPLES)
