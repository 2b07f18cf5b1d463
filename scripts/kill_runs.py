"""Kill runs with -9 at random moments, go on with each, and compare the end with that of a run left alone.

    python scripts/kill_runs.py --kills 200

A kill counts only if the process was still at work. Prints a line for each setting; exits with 1 at any difference.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from partita.core.tensors import digest
from partita.experiment import run_folder
from partita.experiment.config import Config, load, parse
from partita.experiment.runner import resume, start
from partita.record import file_names
from partita.storage.atomic_files import list_checksummed
from partita.storage.checkpoint import BEST

# Rounds of some tens of milliseconds; clients come and go, and every second round has no checkpoint.
BASE = """
rounds = 60
[training]
optimizer = "sgd"
lr = 0.05
[data]
name = "synthetic"
examples = 240
test_examples = 40
size = 4
[split]
name = "iid"
clients = 6
[federation]
cohort = 0.5
client_dropout = 0.1
[engine]
clients_per_block = 1
[evaluate]
personal_every = 20
[checkpoint]
every = 2
[model]
name = "vit"
layers = 2
width = 8
heads = 2
patch = 2
"""
SETTINGS = {
    "scaffold, disk": 'method.name = "scaffold"\nengine.client_state = "disk"',
    "fedper": 'method.name = "fedper"',
    "safl, privacy": """
method = { name = "safl", noise = 1.0, probe = 0.2 }
privacy = { noise = 2.0, accountant = "rdp", repeatable = true }
""",
    "fedfrozen, automatic": 'method.name = "fedfrozen"\nmethod.warmup = "auto"',
    "feddyn": 'method.name = "feddyn"',
    "fedfrozen+moon": 'method.name = "fedfrozen+moon"\nmethod.warmup = 20',
    "fedper, by loss, stop": """
method.name = "fedper"
engine.client_state = "disk"
sampling = { name = "power_of_choice", candidates = 5 }
stop.patience = 30
""",
    "scaffold, 2 workers": 'method.name = "scaffold"\nengine.workers = 2',
}


@dataclass(frozen=True)
class Outcome:
    kills: int
    before_checkpoint: int  # of them, before the first one
    same: bool
    seconds: float


def settings(text: str) -> Config:
    """The base with the tables of the text merged in; a table with another name replaces that of the base."""
    raw = tomllib.loads(BASE)
    for key, value in tomllib.loads(text).items():
        base = raw.get(key, {})
        raw[key] = {**base, **value} if value.get("name") in (None, base.get("name")) else value
    return parse(raw)


def go_on(config: Config, folder: Path, seen: Callable[[], object] = lambda: None) -> None:
    """Begin the run, or resume it; `seen` is called after each round."""
    started = (folder / file_names.CONFIG).exists()
    for _ in resume(load(folder / file_names.CONFIG), folder) if started else start(config, folder):
        seen()


def kill_after(config: Config, folder: Path, seconds: float, wait: bool) -> bool:
    """Go on with the run in a process of its own, and kill it after so many seconds.

    Args:
        wait: count from the end of its first round, and not from its start.

    Returns:
        Whether it was killed; it may have ended before.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            go_on(config, folder, lambda: os.write(writer, b"."))
        except BaseException as error:
            print(f"a resumed run failed by itself: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    os.close(writer)
    if wait:
        os.read(reader, 1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.close(reader)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
        raise RuntimeError(f"{folder} could not be resumed")
    return os.WIFSIGNALED(status)


def result(folder: Path) -> tuple[str, list[object]]:
    """The end but for its time, the values in the best checkpoint, and the rows but for their times."""
    end = {**(run_folder.finished(folder) or {}), "seconds": 0}
    best = [digest(load_file(path)) for path in list_checksummed(folder / file_names.CHECKPOINTS / BEST)[-1:]]
    rows = [{**row, "seconds": 0} for row in run_folder.read_rows(folder)]
    return json.dumps([end, best]), list(rows)


def try_setting(config: Config, kills: int, seed: str, root: Path) -> Outcome:
    whole, killed = root / "whole", root / "killed"
    started, ends = time.perf_counter(), list[float]()
    go_on(config, whole, lambda: ends.append(time.perf_counter()))
    length = ends[-1] - ends[0]
    draws, done, early = random.Random(seed), 0, 0
    while done < kills:
        # A life is a share of the rounds still to come, so that the run is not over before the last kill, even if the
        # machine has become faster since the run that was left alone.
        left = 1 - run_folder.count_rows(killed) / len(ends)
        if run_folder.finished(killed):
            raise RuntimeError(f"the run ended after {done} kills; give it more rounds")
        wait = draws.random() < 0.8  # the others come while the run is built or prepared
        struck = kill_after(config, killed, draws.uniform(0.0, 1.3 * left / (kills - done + 2)) * length, wait)
        done += struck
        early += struck and not run_folder.saved_rounds(killed)
    go_on(config, killed)
    return Outcome(done, early, result(killed) == result(whole), time.perf_counter() - started)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=200, help="over all settings together")
    options.add_argument("--seed", default="0")
    options.add_argument("--settings", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    chosen = options.parse_args()
    torch.set_num_threads(1)  # a fork of a process that has OpenMP threads hangs in its first parallel loop
    share, rest = divmod(chosen.kills, len(chosen.settings))
    print(f"{'setting':22} {'kills':>5}  {'before a checkpoint':>19}  {'same end':>8}  {'s':>6}")
    outcomes = []
    for place, name in enumerate(chosen.settings):
        with tempfile.TemporaryDirectory() as root:
            each = try_setting(settings(SETTINGS[name]), share + (place < rest), f"{chosen.seed} {name}", Path(root))
        outcomes.append(each)
        same = "yes" if each.same else "NO"
        print(f"{name:22} {each.kills:5}  {each.before_checkpoint:19}  {same:>8}  {each.seconds:6.0f}", flush=True)
    differences = sum(not each.same for each in outcomes)
    print(f"{sum(each.kills for each in outcomes)} kills, {differences} differences")
    sys.exit(1 if differences else 0)


if __name__ == "__main__":
    main()
