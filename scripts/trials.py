"""Run the tests that hold a method's file, each time with another source in its place, in processes side by side."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path

from mutants import Mutant

ROOT = Path(__file__).resolve().parent.parent
METHODS = ROOT / "src" / "partita" / "methods"

# Every method is held by tests/methods/test_<file>.py and by its line of the conformance test; some by more than that.
CONFORMANCE = "tests/test_conformance.py::test_every_method_and_supported_composition_conforms"
LAWS = ("tests/test_theorems.py", "tests/test_reductions.py")
MORE_TESTS: dict[str, tuple[str, ...]] = {
    "centralized": LAWS,
    "fedavg": LAWS,
    "fedfrozen": (*LAWS, "tests/methods/test_disagreement.py"),
    "fedprox": LAWS,
    "local_only": LAWS,
}


@dataclass(frozen=True)
class Trial:
    """One run of the tests of a file, with this as its source."""

    file: str
    source: str
    tests: tuple[str, ...]
    limit: float = float("inf")  # seconds
    mutant: Mutant | None = None


@dataclass(frozen=True)
class Outcome:
    trial: Trial
    passed: bool
    seconds: float
    said: str


def tests_of(file: str) -> tuple[str, ...]:
    from partita.methods import INDEX

    own = f"tests/methods/test_{file}.py"
    names = [name for name, place in INDEX.items() if place.startswith(f"partita.methods.{file}:")]
    conform = [f"{CONFORMANCE}[{name}]" for name in names]
    return (*([own] if (ROOT / own).exists() else []), *MORE_TESTS.get(file, ()), *conform)


def preload() -> None:
    """Import once what every trial needs. Nothing may compute here: torch's autograd does not survive a fork."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch

    import partita.conformance  # noqa: F401

    importlib.import_module("sympy")  # torch would load it in the first vmap, which takes half a second
    torch.set_num_threads(1)


def attempt(trial: Trial, folder: Path) -> None:
    """In a process of its own, which ends with pytest's exit status."""
    import pytest

    log = os.open(folder / "log", os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # Failing examples of a mutant must not be kept for the real thing.
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")
    install(trial.file, trial.source)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # no test here needs one, and each takes time to load
    plain = ("-x", "-q", "--tb=short", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}")
    sys.exit(pytest.main([*plain, *trial.tests]))


def install(file: str, source: str) -> None:
    """Let `partita.methods.<file>` be this source, for all who import it from now on."""
    import partita.methods as package

    for name in [name for name in sys.modules if name.startswith("partita.methods.")]:
        delattr(package, name.removeprefix("partita.methods."))
        del sys.modules[name]
    path = METHODS / f"{file}.py"
    spec = importlib.util.spec_from_file_location(f"partita.methods.{file}", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    setattr(package, file, module)
    exec(compile(source, path, "exec"), module.__dict__)


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
                if process.exitcode is None and seconds < trial.limit:
                    continue
                stopped = process.exitcode is None
                process.kill()
                process.join()
                del running[sentinel]
                said = (folder / "log").read_text(errors="replace")
                if not stopped and (process.exitcode or 0) < 0:
                    sys.exit(f"{said}\nthe tests of {trial.file} died by signal {-(process.exitcode or 0)}")
                yield Outcome(trial, process.exitcode == 0, seconds, said)
