"""What must hold on every device. A machine without a GPU skips what is for one."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import small_config
from test_graphs import farthest
from test_graphs import play as play_graphs

from partita import AdamW, record
from partita.engines.choose import choose_graphs
from partita.play import resume, start

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

METHODS = ["fedavg", "scaffold", "fedper"]
ON_GPU: list[dict[str, Any]] = [{"device": "cuda", "block": 1}, {"device": "cuda", "block": 2}]
ON_GPU += [{"device": "cuda", "block": 2, "graphs": False}]
ON_CPU: list[dict[str, Any]] = [{"device": "cpu", "block": 1}, {"device": "cpu", "block": 2}]


def left_by(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """A run's rows but for the time they took, and the digest of all it left."""
    rows = [{name: value for name, value in row.items() if name != "seconds"} for row in record.read_rows(folder)]
    result = record.finished(folder)
    assert result is not None
    return rows, result["digest"]


@on_a_gpu
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("block", [1, 4])
def test_what_is_recorded_is_what_would_have_been_done(block: int, compile: bool) -> None:
    graphs = choose_graphs(True, compile, torch.device("cuda"))
    recorded = play_graphs("fedavg", AdamW(), graphs, block, device="cuda")
    assert farthest(recorded, play_graphs("fedavg", AdamW(), None, block, device="cuda")) < 1e-3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("engine", [*ON_CPU, *(pytest.param(each, marks=on_a_gpu) for each in ON_GPU)], ids=str)
def test_a_run_repeats_and_resumes_exactly(method: str, engine: dict[str, Any], tmp_path: Path) -> None:
    settings = small_config(method, 4, **engine)
    for name in ("whole", "again"):
        list(start(settings, tmp_path / name))
    list(islice(start(settings, tmp_path / "stopped"), 2))
    list(resume(settings, tmp_path / "stopped"))
    whole = left_by(tmp_path / "whole")
    assert left_by(tmp_path / "again") == whole
    assert left_by(tmp_path / "stopped") == whole


@on_a_gpu
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("engine", ON_GPU, ids=str)
def test_two_workers_on_one_gpu_leave_the_record_of_one(method: str, engine: dict[str, Any], tmp_path: Path) -> None:
    for workers in (1, 2):
        list(start(small_config(method, 4, workers=workers, **engine), tmp_path / str(workers)))
    assert left_by(tmp_path / "1") == left_by(tmp_path / "2")
