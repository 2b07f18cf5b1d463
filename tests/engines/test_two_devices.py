"""Workers on several GPUs, or on one GPU that they share, give the result of one process, bit for bit.

The runs on GPUs are skipped where there are none. Every machine tests where workers are placed, and runs the same on
its CPU. `test_multiprocess.py` has more methods on a CPU, with a smaller model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from helpers import small_config

from partita.core import tensors
from partita.core.rounds import rounds
from partita.core.settings import RunError
from partita.engines import multiprocess
from partita.engines.ipc import send
from partita.engines.multiprocess import MultiprocessEngine
from partita.engines.simulation import SimulationEngine
from partita.experiment.builder import build as build_experiment
from partita.experiment.config import Config
from partita.experiment.runner import build_engine, rebuild_engine
from partita.storage.client_store import MemoryStore
from partita.testing.trial import states_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers share memory as on Linux")
GPUS = torch.cuda.device_count()
ON_ONE = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
ON_TWO = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
SHARE = 0.5  # of a GPU's memory, for each of two workers that share it


def build_in_worker(config: Config, folder: Path) -> SimulationEngine:
    """Build as a run's workers do, and leave a file that names the process and its device."""
    engine = rebuild_engine(config, None)
    place = torch.empty(0, device=engine.device).device
    (folder / str(os.getpid())).write_text(str(place))
    return engine


def build_with_half_the_memory(config: Config, folder: Path) -> SimulationEngine:
    """Build in a process that may take half of the GPU's memory and no more."""
    torch.cuda.set_per_process_memory_fraction(SHARE)
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    try:
        torch.empty(int(total * (SHARE + 0.05)), dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        return build_in_worker(config, folder)
    raise RunError("the limit on this process's memory has no effect")


@pytest.mark.parametrize(
    ("device", "build", "places"),
    [
        pytest.param("cpu", build_in_worker, ["cpu", "cpu"], marks=pytest.mark.slow, id="CPU"),
        pytest.param("cuda", build_with_half_the_memory, ["cuda:0", "cuda:0"], marks=ON_ONE, id="one GPU in halves"),
        pytest.param("cuda", build_in_worker, ["cuda:0", "cuda:1"], marks=ON_TWO, id="two GPUs"),
    ],
)
@pytest.mark.parametrize(("method", "block"), [("fedavg", 1), ("scaffold", 2), ("fedper", 2)])
def test_two_workers_give_the_bits_of_one_process(
    method: str,
    block: int,
    device: str,
    build: Callable[[Config, Path], SimulationEngine],
    places: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if places == ["cuda:0", "cuda:0"]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # both workers on the first GPU, also where two are
    config = small_config(method, 4, device=device, clients_per_block=block)
    experiment = build_experiment(config)
    run, model = experiment.run, experiment.model
    alone, shared = (build_engine(experiment, MemoryStore()) for _ in range(2))
    one = list(rounds(run, model, alone))
    engine = MultiprocessEngine(shared, 2, partial(build, config, tmp_path))
    try:
        many = list(rounds(run, model, engine))
    finally:
        engine.close()
    assert sorted(file.read_text() for file in tmp_path.iterdir()) == places, "each worker trained, on its own device"
    assert all(tensors.equal(mine.server.params, its.server.params) for mine, its in zip(many, one, strict=True))
    assert not tensors.equal(many[0].server.params, many[-1].server.params)
    assert [each.traffic for each in many] == [each.traffic for each in one]
    kept, expected = states_of(run, shared), states_of(run, alone)
    assert all(tensors.equal(kept[client], expected[client]) for client in expected)
    assert any(state for state in expected.values()) == (method != "fedavg")


def test_workers_are_placed_on_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each makes its GPU the current one before it builds: engines say "cuda", which means the current one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    engine = build_engine(build_experiment(small_config("fedavg", 1, device="cpu")), MemoryStore())
    engine.device = torch.device("cuda")
    placed = [multiprocess._device(engine, number) for number in range(5)]
    assert [str(device) for device in placed] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]

    steps: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: steps.append(str(device)))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)

    def build() -> SimulationEngine:
        steps.append("build")
        raise RunError("built")

    ours, theirs = Pipe()
    send(ours, ["a request"])
    send(ours, [])
    multiprocess._serve(theirs, build, placed[1], torch.empty(0, dtype=torch.uint8))
    assert steps == ["cuda:1", "build"]
