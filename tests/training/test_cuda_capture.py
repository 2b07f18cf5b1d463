"""A capture that fails leaves nothing behind. Fakes stand for torch here; test_devices.py has the real one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from partita.training import cuda_capture
from partita.training.cuda_capture import CudaRecorder


class Gpu:
    """What torch keeps of captures, as far as a failure damages it."""

    def __init__(self) -> None:
        self.stream = "default"
        self.allocating: list[Any] = []  # pools of captures that the allocator looks for
        self.uses: dict[Any, int] = {}  # pool -> graphs that use it
        self.pools = 0
        self.valid = True  # whether CUDA accepts the capture
        self.generator = Generator()

    def new_pool(self) -> int:
        self.pools += 1
        return self.pools


class Generator:
    """A generator, which shares its state with those that it is set from."""

    device = torch.device("cpu")

    def __init__(self, *_: object) -> None:
        self.state: dict[str, Any] = {"seed": 11, "capturing": False}

    def initial_seed(self) -> int:
        return int(self.state["seed"])

    def manual_seed(self, seed: int) -> None:
        self.state["seed"] = seed

    def graphsafe_get_state(self) -> Generator:
        other = Generator()
        other.state = self.state
        return other

    def graphsafe_set_state(self, other: Generator) -> None:
        self.state = other.state


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()

    class Graph:
        """As in torch 2.11: a capture that CUDA refuses to end changes nothing else."""

        ended = False

        def capture_begin(self, pool: Any) -> None:
            assert gpu.stream != "default"
            assert pool not in gpu.allocating
            self.mine, self.state = pool, gpu.generator.state
            self.state["capturing"] = True
            gpu.allocating.append(pool)
            gpu.uses[pool] = gpu.uses.get(pool, 0) + 1

        def capture_end(self) -> None:
            if not gpu.valid or self.ended:
                raise RuntimeError("operation failed due to a previous error during capture")
            gpu.allocating.remove(self.mine)
            self.state["capturing"], self.ended = False, True

        def pool(self) -> Any:
            if not self.ended:
                raise RuntimeError("without a preceding successful capture")
            return self.mine

        def replay(self) -> None:
            assert not self.state["capturing"]

    @contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        before, gpu.stream = gpu.stream, stream
        try:
            yield
        finally:
            gpu.stream = before

    def release(device: int, pool: Any) -> None:
        gpu.uses[pool] -= 1

    def end(device: int, pool: Any) -> None:
        if pool not in gpu.allocating:
            raise RuntimeError("not currently recording to mempool_id")
        gpu.allocating.remove(pool)

    for name, fake in {
        "CUDAGraph": Graph, "graph_pool_handle": gpu.new_pool, "Stream": object, "stream": on_stream,
        "synchronize": lambda: None, "empty_cache": lambda: None, "current_device": lambda: 0,
        "default_generators": (gpu.generator,),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(cuda_capture, "end_allocate_to_pool", end)
    monkeypatch.setattr(cuda_capture, "release_pool", release)
    return gpu


def refused(gpu: Gpu) -> Tensor:
    """Work during which CUDA invalidates the capture."""
    gpu.valid = False
    raise RuntimeError("operation not permitted when stream is capturing")


def mistaken() -> Tensor:
    """Work that fails without CUDA."""
    raise KeyError("no such name")


def untouched(gpu: Gpu, before: dict[str, Any]) -> bool:
    state = gpu.generator.state
    return state is before and not state["capturing"] and gpu.stream == "default" and not gpu.allocating


@pytest.mark.slow
def test_captures_share_memory_and_replay(gpu: Gpu) -> None:
    recorder, before = CudaRecorder(), gpu.generator.state
    for _ in range(2):
        replay, result = recorder(lambda: torch.ones(1))
        replay()
        assert result == 1
        assert untouched(gpu, before)
    assert gpu.uses == {1: 2}
    assert gc.isenabled()


@pytest.mark.slow
def test_no_two_captures_draw_from_the_same_generator(gpu: Gpu) -> None:
    recorder, seeds = CudaRecorder(), []

    def draw() -> Tensor:
        seeds.append(gpu.generator.initial_seed())
        return torch.ones(1)

    for _ in range(3):
        recorder(draw)
    assert len({*seeds, gpu.generator.initial_seed()}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["capture", "work"])
def test_a_failed_capture_leaves_stream_generator_and_memory_as_they_were(gpu: Gpu, fails: str) -> None:
    recorder, before = CudaRecorder(), gpu.generator.state
    first, _ = recorder(lambda: torch.ones(1))
    # The error is that of the work, not the one with which the capture ends.
    with pytest.raises((RuntimeError, KeyError), match=r"not permitted when|no such name"):
        recorder((lambda: refused(gpu)) if fails == "capture" else mistaken)
    assert untouched(gpu, before)
    assert gc.isenabled()
    assert gpu.uses == {1: 1 if fails == "capture" else 2}  # a graph whose capture ended releases its memory itself
    first()
    gpu.valid = True
    again, _ = recorder(lambda: torch.ones(1))
    again()
    assert gpu.uses[2] == 1  # in memory of its own
    assert untouched(gpu, before)


@pytest.mark.slow
def test_a_capture_that_fails_at_its_end_is_an_error(gpu: Gpu) -> None:
    recorder, before = CudaRecorder(), gpu.generator.state

    def invalidate() -> Tensor:
        gpu.valid = False
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="previous error during capture"):
        recorder(invalidate)
    assert untouched(gpu, before)
    assert gpu.uses == {1: 0}
