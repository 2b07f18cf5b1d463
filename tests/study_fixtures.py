"""A tiny study, and functions that stand in for its runs in the processes of the queue."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

from playing.lines import Line
from playing.study import Planned

CONFIG = """
rounds = 3
[data]
name = "synthetic"
examples = 120
test_examples = 60
classes = 4
[split]
name = "dirichlet"
clients = 3
alpha = 0.5
validation = 0.3
[model]
name = "vit"
layers = 1
width = 8
heads = 2
patch = 4
[training]
lr = 1e-2
epochs = 1
[engine]
threads = 1
device = "cpu"
[checkpoint]
every = 1
[evaluate]
drift = false
personal_every = 3
[method]
name = "fedavg"
"""
STUDY = """
config = "tiny.toml"
score = "accuracy"
seeds = [0, 1, 2]
baseline = "fedavg"
last = 2
[arms.fedavg]
"method.name" = "fedavg"
[arms.broken]
"model.patch" = 3
[arms."fedprox 0.1"]
method.name = "fedprox"
method.mu = 0.1
"""


STUDIES = Path(__file__).parents[1] / "studies"


def load_script(path: str) -> Any:
    """Return a script of a study, such as "backbone/align", as a module."""
    name = path.replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, STUDIES / f"{path}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def write_study(folder: Path, study: str = STUDY, config: str = CONFIG) -> Path:
    """Write a study and its config, and return the study's file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.toml").write_text(config)
    (folder / "small.toml").write_text(study)
    return folder / "small.toml"


def stand_in(planned: Planned, work: Path, threads: int, commit: str | None, again: bool) -> Line:
    """Do what the arm's name says, and leave a trace of each try."""
    with (work / "tries").open("a") as file:
        file.write(f"{planned.arm} {planned.seed} {again}\n")
    if planned.arm.startswith("slow"):
        time.sleep(600)
    if planned.arm == "fails":
        raise ValueError("wrong")
    if planned.arm == "fails once" and not again:
        raise RuntimeError("CUDA is out of memory")
    if planned.arm == "dies":
        os._exit(7)
    return {**planned.identity, "seconds": 1.0, "process": os.getpid(), "threads": os.environ["OMP_NUM_THREADS"]}
