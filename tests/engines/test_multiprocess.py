"""Several worker processes give the results of one process, bit for bit."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe, forkserver
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from compression_fixtures import WIDE_MODEL
from helpers import Clients, small_config, toy_model, toy_run
from torch import Tensor

from partita.compression.prune import prune
from partita.core import tensors
from partita.core.client import ClientError
from partita.core.rounds import initial_server, make_job, rounds
from partita.core.server_rule import Server
from partita.core.settings import RunError
from partita.core.tensors import Tensors
from partita.engines.autotune import choose_block, configure_backends
from partita.engines.availability import Availability
from partita.engines.ipc import receive, send, shared_buffer, tensor_views
from partita.engines.multiprocess import MultiprocessEngine, _Worker
from partita.engines.simulation import SimulationEngine
from partita.experiment import runner
from partita.experiment.builder import build as build_experiment
from partita.methods import build
from partita.storage.client_store import MemoryStore
from partita.testing.toy import ToyTransformer
from partita.testing.trial import states_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers share memory as on Linux")
CLIENTS = Clients(c0=3, c1=9, c2=12, c3=6, c4=5)
CPU = torch.device("cpu")
SPAWN = pytest.param(True, id="new processes", marks=pytest.mark.slow)
BOTH_START_METHODS = pytest.mark.parametrize("spawn", [pytest.param(False, id="forks"), SPAWN])


def make_engine(name: str, block: int = 1, lr: float = 0.05) -> SimulationEngine:
    """Module-level, so that new processes can import it; they configure torch like this process."""
    configure_backends("auto")
    run = toy_run(build(name), lr=lr, count=4, cohort=4)
    return SimulationEngine(
        run, toy_model(), CLIENTS, block, availability=Availability(client_dropout=0.2, straggler_rate=0.3)
    )


def failing_build() -> SimulationEngine:
    raise RunError("no engine can be built here")


@contextmanager
def worker_engine(
    make: Callable[[], SimulationEngine], spawn: bool = False, count: int = 2
) -> Iterator[MultiprocessEngine]:
    engine = MultiprocessEngine(make(), count, make if spawn else None)
    try:
        yield engine
    finally:
        engine.close()
        assert not any(process.is_alive() for process in engine.processes)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("name", "block", "spawn"),
    [
        *(
            (name, block, False)
            for name in ("fedavg", "scaffold", "fedper", "fedtp", "fedfrozen+moon")
            for block in (1, 2)
        ),
        *((name, block, True) for name, block in (("scaffold", 2), ("fedper", 1))),
    ],
)
def test_workers_give_the_result_of_one_process(name: str, block: int, spawn: bool) -> None:
    make = partial(make_engine, name, block)
    alone = make()
    run, model = alone.run, alone.model
    one = list(rounds(run, model, alone))
    with worker_engine(make, spawn) as engine:
        many = list(rounds(run, model, engine))
        assert [each.lost for each in many] == [each.lost for each in one]
        assert [each.traffic for each in many] == [each.traffic for each in one]
        assert all(tensors.equal(mine.server.params, its.server.params) for mine, its in zip(many, one, strict=True))
        kept = states_of(run, engine.engine)
        for client, expected in states_of(run, alone).items():
            assert tensors.equal(kept[client], expected), client
        jobs = [make_job(run, model, one[-1].server, 3, client)[0] for client in CLIENTS.clients]
        assert dict(engine.evaluate(jobs)) == dict(alone.evaluate(jobs))


@pytest.mark.slow
def test_workers_keep_what_transforms_remember() -> None:
    run = toy_run(prune(keep=0.02, error_feedback=True), count=3, cohort=3)
    alone, shared = (SimulationEngine(run, WIDE_MODEL, CLIENTS) for _ in range(2))
    one = list(rounds(run, WIDE_MODEL, alone))
    with worker_engine(lambda: shared) as engine:
        many = list(rounds(run, WIDE_MODEL, engine))
        kept = states_of(run, engine.engine)
    assert tensors.equal(many[-1].server.params, one[-1].server.params)
    expected = states_of(run, alone)
    assert all(tensors.equal(kept[client], expected[client]) for client in CLIENTS.clients)
    assert any(state for state in expected.values())


@pytest.mark.slow
def test_abandoned_round_does_not_affect_later_rounds() -> None:
    plain = make_engine("fedavg")
    run, model = plain.run, plain.model
    with worker_engine(partial(make_engine, "fedavg"), count=3) as engine:
        server = initial_server(run, model)
        first = next(engine.train(make_job(run, model, server, 0, client)[0] for client in CLIENTS.clients))
        assert first.client == "c0"
        again = list(rounds(run, model, engine))
        assert tensors.equal(again[-1].server.params, list(rounds(run, model, plain))[-1].server.params)


@pytest.mark.fast_cases(1)
@BOTH_START_METHODS
def test_client_error_in_a_worker_names_the_client(spawn: bool) -> None:
    with (
        worker_engine(partial(make_engine, "fedavg", lr=1e9), spawn) as engine,
        pytest.raises(ClientError, match=r"client 'c\d': (the loss is nan|sent an update of norm)"),
    ):
        list(rounds(engine.engine.run, engine.engine.model, engine))


@BOTH_START_METHODS
def test_dead_worker_raises_an_error(spawn: bool) -> None:
    with worker_engine(partial(make_engine, "fedavg"), spawn) as engine:
        for process in engine.processes:
            os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        with pytest.raises(RunError, match="a worker process died"):
            list(rounds(engine.engine.run, engine.engine.model, engine))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def train_forever(spawn: bool, tell: int) -> None:
    forkserver._forkserver.__init__()  # type: ignore[attr-defined]  # one of an earlier test belongs to the parent
    make = partial(make_engine, "fedavg")
    engine = MultiprocessEngine(make(), 3, make if spawn else None)
    while True:
        list(rounds(engine.engine.run, engine.engine.model, engine))
        os.write(tell, " ".join(str(process.pid) for process in engine.processes).encode() + b"\n")


@pytest.mark.slow
@BOTH_START_METHODS
def test_workers_end_when_their_parent_is_killed(spawn: bool) -> None:
    hear, tell = os.pipe()
    parent = os.fork()
    if parent == 0:
        train_forever(spawn, tell)
    os.close(tell)
    with os.fdopen(hear) as told:
        pids = [int(word) for word in told.readline().split()]
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
    assert len(pids) == 3
    until = time.monotonic() + 5  # seconds; more than needed unless the machine is busy
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(is_running, pids))


@pytest.mark.slow
def test_error_while_building_a_worker_engine_is_raised() -> None:
    alone = make_engine("fedavg")
    engine = MultiprocessEngine(alone, 2, failing_build)
    try:
        with pytest.raises(RunError, match="no engine can be built here"):
            list(rounds(alone.run, alone.model, engine))
    finally:
        engine.close()


def failing_train(jobs: Any) -> Any:
    raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing. See ...")


def test_forks_of_a_process_that_has_used_a_gpu_name_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = make_engine("fedavg")
    monkeypatch.setattr(alone, "train", failing_train)
    engine = MultiprocessEngine(alone, 1)
    try:
        with pytest.raises(RunError, match=r"has trained on a GPU; start the run in a new process"):
            list(rounds(alone.run, alone.model, engine))
    finally:
        engine.close()


def test_unsupported_worker_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = make_engine("fedavg")
    with pytest.raises(RunError, match=r"engine\.workers is 0"):
        MultiprocessEngine(alone, 0)
    with pytest.raises(RunError, match="does not support `wire`"):
        MultiprocessEngine(SimulationEngine(alone.run, alone.model, CLIENTS, wire=True), 2)
    alone.device = torch.device("cuda")
    with pytest.raises(RunError, match="cannot be forks; pass MultiprocessEngine a `build`"):
        MultiprocessEngine(alone, 2)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RunError, match=r"needs Linux, .* set it to 1"):
        MultiprocessEngine(alone, 2)


def test_worker_copies_only_changed_parameters_from_the_shared_board() -> None:
    """A GPU worker holds one copy for all its clients; every machine has the device "meta"."""
    meta = torch.device("meta")
    with worker_engine(partial(make_engine, "fedavg")) as engine:
        run, model = engine.engine.run, engine.engine.model
        worker = _Worker(engine.engine, meta, torch.zeros(10_000, dtype=torch.uint8))

        def read(server: Server, **own: Tensor) -> tuple[Tensors, Tensors]:
            """The parameters of two clients in a round; the second has some of its own."""
            one, two = (make_job(run, model, server, 0, client)[0] for client in ("c0", "c1"))
            orders = engine._requests([one, replace(two, params={**two.params, **own})])
            first, second = (worker._job(order).params for order in orders)
            assert first.keys() == second.keys() == model.initial.keys()
            return first, second

        server, own = initial_server(run, model), torch.ones(3, 4)
        first, second = read(server, **{"head.weight": own})
        assert second["head.weight"] is own
        assert all(
            value is second[name] and value.device == meta for name, value in first.items() if "head" not in name
        )
        moved = replace(server, params={**server.params, "embed.weight": torch.ones(4, 4)})
        later, _ = read(moved)
        assert {name for name in later if later[name] is not first[name]} == {"embed.weight"}
        assert tensors.equal(engine.shared_params, moved.params)


def test_shared_buffer_holds_each_parameter_aligned() -> None:
    like = {
        "b": torch.randn(10, 10),
        "a": torch.arange(7),
        "d": torch.tensor(1.5),
        "c": torch.randn(3, 5).bfloat16(),
        "e": torch.empty(0),
    }
    flat = shared_buffer(like)
    shown = tensor_views(flat, like)
    for name, value in like.items():
        shown[name].copy_(value)
    assert tensors.equal(shown, like)
    assert all(place.data_ptr() % 64 == flat.data_ptr() % 64 for place in shown.values())


@pytest.mark.parametrize(
    ("workers", "gpus", "block"),
    [(1, 1, 3), (1, 2, 3), (2, 2, 2), (2, 1, 1), (4, 2, 1), (8, 8, 1)],
)
def test_block_size_divides_free_gpu_memory_between_workers(
    workers: int, gpus: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU has 12 GB free, of which half is kept as a reserve; each worker needs what this process holds."""
    monkeypatch.setattr(ToyTransformer, "to", lambda self, device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * 10**9)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 4 * 10**9)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12 * 10**9, 16 * 10**9))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    alone = make_engine("fedavg")
    chosen = choose_block(alone.run, alone.model, CLIENTS, torch.device("cuda"), workers=workers)
    assert chosen == block


def test_pipe_message_arrives_as_it_was_sent() -> None:
    """Every dtype and shape, empty tensors, views and strided tensors; shared tensors stay shared."""
    grid = torch.arange(12.0).view(3, 4)
    parts = {
        "large": torch.randn(300_000),  # more than a pipe can buffer
        "view": grid[1:, ::2].t(),
        "half": grid.bfloat16(),
        "number": torch.tensor(7),
        "none": torch.empty(0, 3),
        "truth": grid > 4,
        "tracked": grid.clone().requires_grad_(),
        **{f"small {number}": torch.tensor(number) for number in range(1100)},  # more than one system call can take
    }
    ours, theirs = Pipe()
    sender = Thread(target=send, args=(theirs, {"parts": parts, "again": [parts["view"]], "word": "x"}))
    sender.start()
    got = receive(ours, CPU)
    sender.join()
    assert tensors.equal(got["parts"], parts)
    assert got["again"][0] is got["parts"]["view"]
    assert got["word"] == "x"
    assert all(value.data_ptr() % 64 == 0 for value in got["parts"].values())
    assert not any(value._is_view() for value in got["parts"].values())


def test_truncated_pipe_message_raises_eof_error() -> None:
    ours, theirs = Pipe()
    file, large = theirs.fileno(), torch.zeros(1000)
    whole, end = Pipe()
    send(end, large)
    theirs.send_bytes(whole.recv_bytes())
    os.write(file, bytes(100))  # of 4000 bytes
    theirs.close()
    with pytest.raises(EOFError):
        receive(ours, CPU)


def test_worker_builds_the_engine_of_the_experiment() -> None:
    """As on GPUs: from the config alone, with the block size chosen for a worker."""
    experiment = build_experiment(small_config("fedper", 3, device="cpu", workers=2))
    engines = runner.build_engine(experiment, MemoryStore()), runner.rebuild_engine(runner._resolved(experiment), None)
    assert [engine.block for engine in engines] == [2, 2]
    one, other = (list(rounds(experiment.run, experiment.model, engine))[-1].server.params for engine in engines)
    assert tensors.equal(one, other)


def test_workers_leave_ctrl_c_to_their_parent() -> None:
    workers = MultiprocessEngine(make_engine("fedavg"), 1)
    try:
        [process] = workers.processes
        status = Path(f"/proc/{process.pid}/status").read_text()
        blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk")).split()[1], 16)
        assert blocked & (1 << (signal.SIGINT - 1))
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, []), "the parent itself sees it"
    finally:
        workers.close()
