"""Captures work on a GPU as CUDA graphs, so that a failed capture leaves torch as it was.

torch ends a capture in several steps. If CUDA finds the capture invalid, for example because the work waited for the
GPU, the steps that follow are left out: the current stream stays the one of the capture, the memory allocator keeps
looking for the capture, and the default random generator believes to be captured, so that the next random draw of the
process fails. `CudaRecorder` takes these steps itself, and gives each capture a generator of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch

from partita.core.torch_private import end_allocate_to_pool, release_pool

# A function that replays the captured work, and the tensor of its result.
Replay = tuple[Callable[[], None], torch.Tensor]
Recorder = Callable[[Callable[[], torch.Tensor]], Replay]


class CudaRecorder:
    """Captures CUDA graphs. They share one memory pool: only tensors outside the pool must survive a replay."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.stream: Any = None
        self.captures = 0
        self.graphs: WeakSet[Any] = WeakSet()  # those in the pool that are still in use
        self.failed: list[Any] = []  # torch's allocator of pinned memory may still ask these graphs

    def __call__(self, work: Callable[[], torch.Tensor]) -> Replay:
        """Capture work without running it.

        Raises:
            Exception: What the work or the capture raises. Afterwards, the process can draw, train and capture again.
        """
        self.captures += 1
        graph = torch.cuda.CUDAGraph()
        with _no_garbage():
            # One stream for all: the memory of a pool is reused within a stream. torch releases a pool with its last
            # graph, and refuses captures into it afterwards.
            pool = self.pool if self.graphs else torch.cuda.graph_pool_handle()
            stream = self.stream or torch.cuda.Stream()
            graphs = WeakSet([graph, *self.graphs])
            self.pool, self.stream, self.graphs = None, None, WeakSet()  # until the capture has succeeded
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            with _own_generator(self.captures), torch.cuda.stream(stream):
                graph.capture_begin(pool)
                try:
                    result = work()
                    graph.capture_end()
                except BaseException:
                    self._abandon(graph, pool)
                    raise
        self.pool, self.stream, self.graphs = pool, stream, graphs
        return graph.replay, result

    def _abandon(self, graph: Any, pool: Any) -> None:
        """Do what torch leaves undone after a failure."""
        with suppress(RuntimeError):  # fails if the capture has ended already, or is invalid
            graph.capture_end()
        try:
            graph.pool()
        except RuntimeError:  # the capture did not end well, so the graph will not release its memory
            device = torch.cuda.current_device()
            for undo in (end_allocate_to_pool, release_pool):
                with suppress(RuntimeError):  # fails if torch has done it
                    undo(device, pool)
            self.failed.append(graph)


@contextmanager
def _own_generator(number: int) -> Iterator[None]:
    """Let random draws in the block come from a new generator. Earlier graphs keep theirs.

    Args:
        number: The number of the capture, so that no two draw the same numbers.
    """
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    before = default.graphsafe_get_state()
    own = torch.Generator(default.device)
    own.manual_seed((default.initial_seed() + number) % 2**63)
    default.graphsafe_set_state(own)
    try:
        yield
    finally:
        default.graphsafe_set_state(before)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Disable garbage collection: collecting an old graph during a capture would break the capture."""
    gc.collect()
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
