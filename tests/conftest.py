"""Settings for all tests."""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING

import pytest
from budget import Budget, mark_other_cases_slow
from hypothesis import settings

if TYPE_CHECKING:
    from shell import Shell

# One thread per worker: more would compete with the other workers, and tensors this small gain nothing. Set in the
# environment before torch is imported, so that it reaches subprocesses and tests without torch need not import it.
os.environ["OMP_NUM_THREADS"] = "1"

# A test that would download something fails at once, on every machine.
os.environ["HF_HUB_OFFLINE"] = "1"

# No test cuts the power, so fsync would only cost time.
os.fsync = lambda handle: None  # type: ignore[assignment]

# Without PYTHONDONTWRITEBYTECODE, pytest keeps the tests whose asserts it rewrote, which halves the time of collection.
# Here they are kept in any case, in the folders __pycache__ that git ignores.
sys.dont_write_bytecode = False

# Collection imports torch, transformers and more, and nearly all of these objects stay alive: the garbage collector
# should not scan them, neither during collection nor later.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that started the workers
        config.pluginmanager.register(Budget())


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_other_cases_slow(items, config.args)
    if on_gpu := [item for item in items if item.get_closest_marker("gpu")]:
        import torch

        for item in on_gpu if not torch.cuda.is_available() else ():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.items and not session.config.option.collectonly:
        # As a run does, which is several times faster on some machines. It imports torch, which is not to count as
        # time of the first test.
        from partita.engines.autotune import configure_backends

        configure_backends("auto")
    gc.freeze()
    gc.enable()


def pytest_runtest_teardown() -> None:
    """Give later tests one thread again: a comparison that a test plays in this process gives its runs all cores."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


# The first call of a torch operation is far slower than the next, so a deadline would fail at random.
settings.register_profile("partita", deadline=None)
settings.load_profile("partita")


@pytest.fixture(scope="session", autouse=True)
def no_trusted_code(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the list of trusted code and the cache of data out of the user's home."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    os.environ["PARTITA_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def run_partita(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """Run a command in this process: `run_partita("ls")` returns exit code, output and errors."""
    from shell import Shell

    return Shell(monkeypatch, capsys)
