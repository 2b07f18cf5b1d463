"""A run killed with SIGKILL at random moments gives the tensors of an uninterrupted run, bit for bit."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from helpers import server_in

from partita.core import tensors
from partita.experiment import run_folder
from partita.experiment.config import Config
from partita.methods import NEEDS_DUAL_ENCODER, build

KILLS = 8
ROUNDS, FEWER_KILLS = 12, 3  # of the run of each kind of method
# What a method leaves on disk, besides the parameters of the server, and where its clients' state is held. Conformance
# resumes every method; the settings of scripts/kill_runs.py have the other kinds: what clients keep (fedper), choose
# (safl) and remember (moon), and what the server decides (fedfrozen).
KINDS = {
    "nothing": ("fedavg", "memory"),
    "a state of the server": ("fedadam", "memory"),
    "both, and a transform": ("fedadamw", "memory"),
    "parameters of its own, also at the server": ("flora", "memory"),
    "a copy of each client's own": ("ditto", "memory"),
    "moments of each client": ("local-only", "disk"),
    "all data in one place": ("centralized", "memory"),
    "prompts of two towers": ("promptfl", "memory"),
}
SETTINGS_ROUNDS = 24  # the script plays 60
SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))  # as when the script is run
kill_runs = import_module("kill_runs")
try_setting = kill_runs.try_setting


def kill_config(method: str, state: str) -> Config:
    """The federation of scripts/kill_runs.py, with one layer and the usual learning rate."""
    optimizer = "adamw" if build(method).supports_optimizer("adamw") else "sgd"
    model = '{ name = "clip", shape = "tiny" }' if method in NEEDS_DUAL_ENCODER else "{ layers = 1 }"
    changes = f'''
method.name = "{method}"
training = {{ optimizer = "{optimizer}", lr = 0.001 }}
engine.client_state = "{state}"
model = {model}
'''
    config = kill_runs.settings(changes)
    assert isinstance(config, Config)
    return config


@pytest.mark.slow
@pytest.mark.parametrize(("method", "state"), [("scaffold", "disk")])
def test_many_kills_do_not_change_the_result(method: str, state: str, tmp_path: Path) -> None:
    kill_and_compare(replace(kill_config(method, state), rounds=SETTINGS_ROUNDS), KILLS, f"{method} {state}", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_kills_do_not_change_the_result_of_any_kind_of_method(kind: str, tmp_path: Path) -> None:
    method, state = KINDS[kind]
    config = kill_config(method, state)
    # A checkpoint of each round, so that few kills suffice for one after a checkpoint.
    checkpoint, evaluate = replace(config.checkpoint, every=1), replace(config.evaluate, personal_every=ROUNDS // 3)
    config = replace(config, rounds=ROUNDS, checkpoint=checkpoint, evaluate=evaluate)
    kill_and_compare(config, FEWER_KILLS, f"{method} {state}", tmp_path)


def kill_and_compare(config: Config, kills: int, seed: str, tmp_path: Path) -> None:
    outcome = try_setting(config, kills, seed, tmp_path)
    assert outcome.kills == kills
    assert outcome.same
    ends = [server_in(tmp_path / name) for name in ("whole", "killed")]
    assert tensors.equal(ends[0].params, ends[1].params)
    assert ends[0].versions == ends[1].versions


def test_fork_does_not_hold_the_lock_of_a_dead_parent(tmp_path: Path) -> None:
    hear, tell = os.pipe()
    if (parent := os.fork()) == 0:
        with run_folder.lock(tmp_path):
            if os.fork() == 0:
                os.write(tell, str(os.getpid()).encode())  # from here, so that the child has released what it inherited
            time.sleep(60)
    child = int(os.read(hear, 20))
    try:
        with pytest.raises(run_folder.RunFolderError, match="in use by another process"), run_folder.lock(tmp_path):
            pass
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        with run_folder.lock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in kill_runs.SETTINGS if name != "scaffold, disk"])  # as above
def test_kills_in_several_settings_do_not_change_the_result(name: str, tmp_path: Path) -> None:
    config = replace(kill_runs.settings(kill_runs.SETTINGS[name]), rounds=SETTINGS_ROUNDS)
    outcome = try_setting(config, 2, name, tmp_path)
    assert outcome.same
    assert outcome.kills == 2
