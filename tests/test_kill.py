"""A run killed with -9 at twenty random moments ends with the same tensors, bit for bit, as one left alone."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import tomllib
from pathlib import Path

import pytest
from helpers import SMALL_VIT

from partita import record
from partita.config import Config, load, parse
from partita.core import checkpoint, tree
from partita.core.files import sealed
from partita.methods import INDEX, ON_TOWERS, build
from partita.play import resume, start

KILLS = 20

# Rounds of some tens of milliseconds; clients come and go, and every second round has no checkpoint.
SETTINGS = (
    """
rounds = 60
[method]
name = "{method}"
[training]
optimizer = "{optimizer}"
[data]
name = "synthetic"
examples = 240
test_examples = 40
size = 4
[split]
kind = "iid"
clients = 6
[federation]
cohort = 0.5
dropout = 0.1
[engine]
block = 1
state = "{state}"
[evaluate]
personal = 20
[checkpoint]
every = 2
"""
    + SMALL_VIT
)


def settings(method: str, state: str) -> Config:
    optimizer = "adamw" if build(method).takes("adamw") else "sgd"
    raw = tomllib.loads(SETTINGS.format(method=method, state=state, optimizer=optimizer))
    return parse({**raw, "model": {"name": "clip", "shape": "tiny"}} if method in ON_TOWERS else raw)


def go_on(config: Config, folder: Path) -> None:
    begun = (folder / record.CONFIG).exists()
    for _ in resume(load(folder / record.CONFIG), folder) if begun else start(config, folder):
        pass


def live_and_die(config: Config, folder: Path, seconds: float) -> bool:
    """Go on with the run in a process of its own, kill it after so many seconds; whether it was killed in time."""
    child = os.fork()
    if child == 0:
        try:
            go_on(config, folder)
        except BaseException as error:
            print(f"child failed: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "a resumed run failed by itself"
    return os.WIFSIGNALED(status)


def remaining(config: Config, folder: Path) -> float:
    """The fraction of the run's rounds that no row tells of yet."""
    rows = folder / record.ROWS
    return 1 - (len(rows.read_text().splitlines()) if rows.exists() else 0) / config.rounds


# Every method goes through this, one of them in the fast suite; a resumed run is also compared by conformance.
FAST = (("scaffold", "disk"),)


@pytest.mark.parametrize(
    ("method", "state"),
    [
        pytest.param(*each, marks=() if each in FAST else pytest.mark.slow)
        for each in [(name, "memory") for name in INDEX] + [("local-only", "disk"), ("scaffold", "disk")]
    ],
)
def test_twenty_kills_change_nothing(method: str, state: str, tmp_path: Path) -> None:
    config = settings(method, state)
    begun = time.perf_counter()
    go_on(config, tmp_path / "whole")
    length = time.perf_counter() - begun
    draws, kills = random.Random(f"{method} {state}"), 0
    while kills < KILLS and not record.finished(tmp_path / "killed"):
        # A life is a share of the rounds still to come, so that however slow the machine was when the length was
        # measured, the run is not over when the last kill comes.
        share = remaining(config, tmp_path / "killed") / (KILLS - kills + 1)
        kills += live_and_die(config, tmp_path / "killed", draws.uniform(0.0, share) * length)
        for path in sealed(tmp_path / "killed" / "checkpoints"):
            checkpoint.load(path)  # whole, or it would not load
    assert kills == KILLS, f"the run ended after {kills} kills; make it longer"
    go_on(config, tmp_path / "killed")
    whole, killed = (json.loads((tmp_path / name / record.RESULT).read_text()) for name in ("whole", "killed"))
    assert killed["digest"] == whole["digest"]
    ends = [checkpoint.load(sealed(tmp_path / name / "checkpoints")[-1])[1] for name in ("whole", "killed")]
    assert tree.equal(ends[0].params, ends[1].params)
    assert ends[0].ledger == ends[1].ledger
    rows = [(tmp_path / name / record.ROWS).read_text().splitlines() for name in ("whole", "killed")]
    for one, two in zip(*([json.loads(line) for line in lines] for lines in rows), strict=True):
        assert {**one, "seconds": 0} == {**two, "seconds": 0}
