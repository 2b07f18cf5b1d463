"""Run tests with another source in the place of one file, in processes side by side."""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import CodeType

import pytest
from coverage_by_test import Recorder, Trace
from kept import FOLDER
from mutants import Mutant

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "partita"
LOADING = 30.0  # seconds of computing that a mutant may take until its first test
MEMORY = 8 * 2**30  # bytes that a mutant may take: some ask for all there is

# What tests import and what takes long to: loaded once, before the processes part. The package brings its own needs.
HEAVY = (
    *("hypothesis", "pytest", "torch", "opacus", "scipy.stats", "dp_accounting.pld", "dp_accounting.rdp"),
    "sympy",  # torch would load it in the first vmap, which takes half a second
    *(f"transformers.models.{kind}.modeling_{kind}" for kind in ("bert", "llama", "vit")),
    *(
        "partita.testing.conformance",
        "partita.experiment.runner",
        "partita.models.adapter",
        "partita.models.pretrained",
    ),
)


@dataclass(frozen=True)
class Trial:
    """One run of tests. `source` stands in the place of the file's own; without a file nothing is replaced."""

    tests: tuple[str, ...]
    file: str = ""  # below src/partita, such as training/local_training.py
    source: str = ""
    limits: Mapping[str, float] = field(default_factory=dict)  # seconds of computing by test; it may wait longer
    mutant: Mutant | None = None
    traced: tuple[str, ...] = ()  # the files of which it is recorded which test runs which lines


@dataclass(frozen=True)
class Outcome:
    trial: Trial
    passed: bool
    seconds: float
    said: str
    traces: Mapping[str, Trace] = field(default_factory=dict)  # by test


def module_of(file: str) -> str:
    return "partita." + file.removesuffix(".py").replace("/", ".")


def preload() -> None:
    """Import once what every trial needs. Nothing may compute here: torch's autograd does not survive a fork.

    The package itself is imported by each trial: whatever imports a mutant must be imported after it.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(ROOT / "src"))
    # Compile what is not mutated once, whatever the environment says, and leave nothing beside the sources.
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(FOLDER / "compiled")
    for name in HEAVY:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "partita"]:
        del sys.modules[name]


def attempt(trial: Trial, folder: Path) -> None:
    """In a process of its own, which ends with pytest's exit status."""
    log = os.open(folder / "log", os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # Failing examples of a mutant must not be kept for the real thing.
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # no test here needs one, and each takes time to load
    if trial.limits:
        limit_computing(LOADING)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.RLIM_INFINITY))
    forget()
    if trial.file:
        install(trial.file, trial.source)
    recorder = Recorder({str(PACKAGE / file): file for file in trial.traced})
    plain = ("-x", "-q", "--tb=short", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}")
    status = pytest.main([*plain, *trial.tests], plugins=[recorder if trial.traced else _Limiter(trial.limits)])
    (folder / "traces").write_text(json.dumps(recorder.found()))
    sys.exit(status)


class _Limiter:
    """Stops a test that never ends, long before all the others could have run."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        self.limits = limits

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.nodeid in self.limits:
            limit_computing(self.limits[item.nodeid])


def limit_computing(seconds: float) -> None:
    """From now on. Not of time, since a machine that others use too may take any."""
    until = int(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))


class _Planted(SourceFileLoader):
    def __init__(self, name: str, path: Path, source: str) -> None:
        super().__init__(name, str(path))
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = compile(self.source, self.path, "exec")
        return code


class _Finder:
    def __init__(self, loader: _Planted) -> None:
        self.loader = loader

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self.loader.name:
            return None
        return importlib.util.spec_from_file_location(name, self.loader.path, loader=self.loader)


def install(file: str, source: str) -> None:
    """Let the file's module be this source, for all who import it from now on."""
    sys.meta_path.insert(0, _Finder(_Planted(module_of(file), PACKAGE / file, source)))


def outcomes(trials: Sequence[Trial], jobs: int) -> Iterator[Outcome]:
    """Each as it ends. One that runs past its limit is stopped and has not passed."""
    fork = multiprocessing.get_context("fork")
    waiting, running = deque(enumerate(trials)), dict[int, tuple[ForkProcess, Trial, float, Path]]()
    with tempfile.TemporaryDirectory(prefix="partita-mutate-") as name:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, trial = waiting.popleft()
                folder = Path(name) / str(number)
                folder.mkdir()
                (folder / "log").touch()
                process = fork.Process(target=attempt, args=(trial, folder), daemon=True)
                process.start()
                running[process.sentinel] = process, trial, time.monotonic(), folder
            wait(running, timeout=0.5)
            for sentinel, (process, trial, since, folder) in list(running.items()):
                seconds = time.monotonic() - since
                if process.exitcode is None and (not trial.limits or seconds < 10 * sum(trial.limits.values())):
                    continue
                stopped = process.exitcode in (None, -signal.SIGXCPU)
                process.kill()
                process.join()
                del running[sentinel]
                said = (folder / "log").read_text(errors="replace")
                if not stopped and (process.exitcode or 0) < 0:
                    what = trial.file or " ".join(trial.tests)
                    sys.exit(f"{said}\nthe tests of {what} died by signal {-(process.exitcode or 0)}")
                traces = folder / "traces"
                found = json.loads(traces.read_text()) if traces.exists() else {}
                yield Outcome(
                    trial, process.exitcode == 0, seconds, said, {test: Trace(*found[test]) for test in found}
                )
