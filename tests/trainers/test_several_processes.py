"""Two processes that train one client together, against one process with the same examples in each step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import max_difference
from processes_fixtures import CASES, play

import partita

pytest.importorskip("accelerate", reason="transformers.Trainer needs it")
pytest.importorskip("peft")

SCRIPT = """
import sys
from pathlib import Path
import torch
from processes_fixtures import CASES, play

# One start of two processes for all cases: the imports take most of the time.
for each in sys.argv[2:]:
    name, way = each.rsplit("-", 1)
    folder = Path(sys.argv[1]) / each
    values = play(CASES[name], folder, way)
    torch.save(values, folder / f"rank-{torch.distributed.get_rank()}.pt")
try:
    play({**CASES["fedavgm"], "calls": True}, Path(sys.argv[1]) / "calls", "fsdp")
except ValueError as error:
    (Path(sys.argv[1]) / "refusal").write_text(str(error))
"""
PLAYED = [
    *(f"{case}-ddp" for case in ("fedavgm", "fedprox", "fedfrozen", "a rule")),
    *(f"{case}-fsdp" for case in CASES),
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    done = subprocess.run(
        [*command, str(script), str(folder), *PLAYED], capture_output=True, text=True, timeout=300, env=environment()
    )
    assert not done.returncode, done.stderr[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAYED)
def test_two_processes_are_one(name: str, played: Path, tmp_path: Path) -> None:
    ranks = [torch.load(played / name / f"rank-{rank}.pt") for rank in (0, 1)]
    values = play(CASES[name.rpartition("-")[0]], tmp_path)
    assert max_difference(ranks[0], ranks[1]) == 0
    assert max_difference(ranks[0], values) < 1e-6
    there, here = (partita.load_run(folder / "run").rows for folder in (played / name, tmp_path))
    assert [row["bytes"] for row in there] == [row["bytes"] for row in here]
    assert max(abs(loss - other) for loss, other in zip(losses(there), losses(here), strict=True)) < 1e-5


@pytest.mark.slow
def test_a_model_that_ran_before_its_training_is_refused(played: Path) -> None:
    """Its optimizer would train nothing."""
    assert "the model of 'client' ran between round() and train()" in (played / "refusal").read_text()


def losses(rows: Any) -> list[float]:
    return [row["test"]["loss"] for row in rows] + [row["personal"]["loss"]["client"] for row in rows]


def environment() -> dict[str, str]:
    tests = str(Path(__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": f"{tests}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
