"""What holds for every test."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import settings

# One thread a worker: more would fight with the other workers, and tensors this small gain nothing. Said by the
# environment, before torch is loaded, so that it reaches subprocesses and a test without torch need not wait for it.
os.environ["OMP_NUM_THREADS"] = "1"

# A test that would download something fails at once, on every machine alike.
os.environ["HF_HUB_OFFLINE"] = "1"

# No test pulls the plug, so what the kernel holds is as safe as what the disk holds, and much sooner there.
os.fsync = lambda handle: None  # type: ignore[assignment]

# Collecting imports torch, transformers and much else, and nearly all of that stays: nobody should look through it for
# garbage, neither meanwhile nor later.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


# The first call of a torch operation is far slower than the next, so a deadline would fail at random.
settings.register_profile("partita", deadline=None)
settings.load_profile("partita")


@pytest.fixture(scope="session", autouse=True)
def quick_kernels() -> None:
    """As a run chooses them; several times faster on some machines."""
    from partita.engines.autotune import configure_backends

    configure_backends("auto")
