"""The notebooks run from their first to their last cell, with tiny models in place of those of the Hub."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest
from chat_fixtures import ROWS, write_decoder, write_rows

import partita as pt
from partita.models.tiny_encoder import write_tiny_encoder

FOLDER = Path(__file__).resolve().parent.parent.parent / "examples" / "notebooks"
NAMES = ("chat", "reviews")
GOOD, BAD = ("friendly", "quick", "clean", "calm"), ("rude", "slow", "dirty", "loud")


def cells(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    return found


def play(name: str, **given: Any) -> dict[str, Any]:
    """Run the cells in order, with other values in place of those that the first one sets. Return what they set."""
    here: dict[str, Any] = {}
    first, *rest = ["".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == "code"]
    exec(first, here)
    assert given.keys() == here.keys() - {"__builtins__"}
    here |= given
    for source in rest:
        exec(compile(source, f"{name}.ipynb", "exec"), here)
    return here


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_these_are_the_notebooks() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_short_and_holds_no_outputs(name: str) -> None:
    assert 8 <= len(cells(name)) <= 12
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


@pytest.mark.slow
def test_reviews_by_hospital(tmp_path: Path) -> None:
    draw = random.Random(0)
    with (tmp_path / "own.csv").open("w") as file:
        table = csv.writer(file)
        table.writerow(["review", "stars", "hospital"])
        for _ in range(240):
            words = draw.choices(draw.choice([GOOD, BAD]), k=3)
            table.writerow([" ".join(words), 5 if words[0] in GOOD else 1, draw.choice(["north", "south"])])
    write_tiny_encoder(tmp_path / "tiny", [*GOOD, *BAD], pt.Key(0), layers=2, width=16)
    here = play("reviews", MODEL="tiny", REVIEWS="own.csv", ROUNDS=5, LEARNING_RATE=1e-2)
    fedavg, fedfrozen = here["fedavg"], here["fedfrozen"]
    assert fedavg.scores["accuracy"] > 0.9
    assert fedfrozen.scores["accuracy"] > 0.9
    assert list(fedfrozen.by_client.index) == ["north", "south"]
    assert sum(fedfrozen.frame["bytes.up"]) < sum(fedavg.frame["bytes.up"])
    wanted = [str(stars) for stars in here["reviews"]["stars"][:3]]
    assert [each["label"] for each in here["answers"]] == wanted


@pytest.mark.slow
def test_a_chat_model_of_schools(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    write_rows(tmp_path / "own.jsonl", [{"messages": row["messages"], "school": row["site"]} for row in ROWS])
    write_decoder(tmp_path / "tiny")
    here = play("chat", MODEL="tiny", CONVERSATIONS="own.jsonl", ROUNDS=3, LEARNING_RATE=3e-2, TOKENS=64)
    run, trained = here["run"], here["trained"]
    assert run.frame["test.perplexity"].is_monotonic_decreasing
    assert list(run.by_client.index) == ["s0", "s1", "s2"]
    up = {row["name"] for row in run.plan[0]["rows"] if row["up"]}
    assert up
    assert all("lora_A" in name for name in up)
    assert isinstance(trained, peft.PeftModel)
    assert isinstance(here["answer"], str)
    other = run.model(client="s1").state_dict()
    own = trained.state_dict()
    assert {name.split(".")[-3] for name in own if "lora" in name and not own[name].equal(other[name])} >= {"lora_B"}
