"""Simulation on one machine with several worker processes.

On CPUs, workers are forks of this process, so they share its memory for frozen parameters and data. CUDA does not
survive a fork, so on GPUs workers are new processes, and each builds its own engine. In both cases the server's
parameters are in shared memory, and updates return through pipes.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from partita.core.client import ClientError, ClientState, Job
from partita.core.data import EvaluateOn
from partita.core.rounds import ClientFailure
from partita.core.settings import RunError
from partita.core.tensors import Tensors
from partita.core.update import Update
from partita.engines.ipc import ctrl_c_is_for_parent, end_with_parent, receive, send, shared_buffer, tensor_views
from partita.engines.simulation import SimulationEngine, chunks
from partita.storage.client_store import MemoryStore

FORK_FAILURE = "in combination with fork-based multiprocessing"  # what torch says in a fork after training on a GPU
JOBS_AHEAD = 2  # finished replies per worker that may wait for an earlier one; this bounds memory


@dataclass(frozen=True)
class WorkerRequest:
    """A job whose parameters are in shared memory, except those made for this client alone."""

    job: Job  # its `params` hold only the parameters made for this client
    shared: Mapping[str, int]  # parameter in shared memory -> its version
    state: ClientState


@dataclass(frozen=True)
class WorkerReply:
    """A worker's replies to a list of requests."""

    replies: list[Update | ClientFailure]
    states: dict[str, tuple[int, ClientState]]  # client -> (round, state), for states that changed


class MultiprocessEngine:
    """A simulation engine spread over worker processes with one thread each. The results are those of the engine.

    Args:
        engine: The engine to parallelize.
        count: Number of workers.
        build: Creates an equal engine in a new process. If given, workers are spawned and assigned to GPUs
            round-robin; otherwise they are forks.

    Raises:
        RunError: If the engine, the device or the platform does not support workers.
    """

    def __init__(
        self, engine: SimulationEngine, count: int, build: Callable[[], SimulationEngine] | None = None
    ) -> None:
        if count < 1:
            raise RunError(f"engine.workers is {count}; it must be at least 1")
        if sys.platform != "linux":
            raise RunError("engine.workers > 1 needs Linux, for shared memory between processes; set it to 1")
        if engine.wire:
            raise RunError("engine.workers does not support `wire`, because one process must hold the clients' copies")
        if engine.device.type == "cuda" and build is None:
            raise RunError("workers on GPUs cannot be forks; pass MultiprocessEngine a `build` that creates the engine")
        self.engine = engine
        buffer = shared_buffer(engine.model.initial)
        self.shared_params = tensor_views(buffer, engine.model.initial)
        self.written: Tensors = {}  # the tensors whose values are in shared memory
        self.versions = Counter[str]()  # version of each parameter in shared memory
        self.workers: list[Connection] = []
        self.processes: list[BaseProcess] = []
        context = multiprocessing.get_context("forkserver") if build else multiprocessing.get_context("fork")
        if build:
            context.set_forkserver_preload([__name__])  # imports torch once, without touching a GPU
        for number in range(count):
            parent_end, worker_end = context.Pipe()
            args = worker_end, build or (lambda: engine), _device(engine, number), buffer
            self.processes.append(context.Process(target=_serve, args=args, daemon=True))
            with ctrl_c_is_for_parent():
                self.processes[-1].start()
            worker_end.close()  # so that a worker's death closes the pipe
            self.workers.append(parent_end)

    def close(self) -> None:
        """Stop all workers and wait until they have exited."""
        for worker in self.workers:
            with suppress(OSError):  # the worker may be dead already
                send(worker, [])
            worker.close()
        for process in self.processes:
            process.join()  # after this, its memory is free

    def clients(self) -> Sequence[str]:
        return self.engine.clients()

    def train(self, jobs: Iterable[Job]) -> Iterator[Update | ClientFailure]:
        """Train the jobs' clients and yield one reply per job, in order."""
        requests = enumerate(chunks(self._requests(jobs), self.engine.block))
        idle, busy, waiting, next_place = list(self.workers), dict[Connection, int](), dict[int, WorkerReply](), 0
        try:
            while True:
                while next_place in waiting:
                    reply = waiting.pop(next_place)
                    next_place += 1
                    for client, (round, state) in reply.states.items():
                        self.engine.store.save(client, round, state)
                    yield from reply.replies
                while idle and len(waiting) < JOBS_AHEAD * len(self.workers) and (request := next(requests, None)):
                    worker = idle.pop()
                    busy[worker] = request[0]
                    with suppress(OSError):  # if the worker died, reading its answer raises
                        send(worker, request[1])
                if not busy:
                    return
                for ready in wait(list(busy)):
                    worker = next(pipe for pipe in busy if pipe is ready)
                    place = busy.pop(worker)
                    idle.append(worker)
                    waiting[place] = self._receive(worker)
        finally:
            # If the caller stops early, wait for busy workers: they read memory that the next round overwrites.
            for worker in busy:
                with suppress(EOFError, OSError):
                    receive(worker, self.engine.device)

    def evaluate(self, jobs: Iterable[Job], on: EvaluateOn = None) -> Iterator[tuple[str, dict[str, float]]]:
        return self.engine.evaluate(jobs, on)

    def _requests(self, jobs: Iterable[Job]) -> Iterator[WorkerRequest]:
        used: set[str] = set()
        for job in jobs:
            shared = {}
            for name, value in job.params.items():
                if name not in used and self.written.get(name) is not value:
                    self.shared_params[name].copy_(value)
                    self.written[name] = value
                    self.versions[name] += 1
                if self.written[name] is value:
                    shared[name] = self.versions[name]
            used |= shared.keys()
            own = {name: value for name, value in job.params.items() if name not in shared}
            state = self.engine.store.load(job.client, job.round)
            yield WorkerRequest(replace(job, params=own), shared, state)

    def _receive(self, worker: Connection) -> WorkerReply:
        try:
            reply = receive(worker, self.engine.device)
        except (EOFError, OSError) as error:
            raise RunError("a worker process died (out of memory?); lower engine.workers") from error
        if isinstance(reply, WorkerReply):
            return reply
        kind, args = reply
        if FORK_FAILURE in " ".join(map(str, args)):
            raise RunError(
                "workers are forks of this process, and cannot train after it has trained on a GPU; start the run in a "
                "new process, or set engine.workers = 1"
            )
        raise kind(*args)


def _device(engine: SimulationEngine, number: int) -> torch.device:
    if engine.device.type == "cpu":
        return engine.device
    return torch.device(engine.device.type, number % torch.cuda.device_count())


def _serve(
    parent: Connection, build: Callable[[], SimulationEngine], device: torch.device, buffer: torch.Tensor
) -> None:
    end_with_parent()
    # One thread: a fork does not inherit the parent's thread pool, and workers would compete for cores.
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # engines use plain "cuda", which now means this device
    with suppress(EOFError, ConnectionError):  # the parent is gone
        _serve_requests(parent, build, device, buffer)


def _serve_requests(
    parent: Connection, build: Callable[[], SimulationEngine], device: torch.device, buffer: torch.Tensor
) -> None:
    worker: _Worker | None = None
    while requests := receive(parent, device):
        reply: object
        try:
            worker = worker or _Worker(build(), device, buffer)
            reply = worker.reply(requests)
        except ClientError as error:
            reply = ClientError, (error.client, error.reason)
        except Exception as error:
            reply = type(error), (str(error),)
        send(parent, reply)


class _Worker:
    """An engine in a worker process, with the parameters it has read from shared memory."""

    def __init__(self, engine: SimulationEngine, device: torch.device, buffer: torch.Tensor) -> None:
        self.engine, self.device, self.shared_params = engine, device, tensor_views(buffer, engine.model.initial)
        # Name -> (version, tensor); on a CPU, a view of shared memory.
        self.read: dict[str, tuple[int, torch.Tensor]] = {}

    def reply(self, requests: Sequence[WorkerRequest]) -> WorkerReply:
        store = self.engine.store = MemoryStore()
        store.held = {request.job.client: (request.job.round - 1, request.state) for request in requests}
        replies = list(self.engine.train([self._job(request) for request in requests]))
        return WorkerReply(replies, {client: store.held[client] for client in store.changed})

    def _job(self, request: WorkerRequest) -> Job:
        for name, version in request.shared.items():
            if name not in self.read or self.read[name][0] != version:
                self.read[name] = version, self.shared_params[name].to(self.device)
        shared = {name: self.read[name][1] for name in sorted(request.shared)}
        return replace(request.job, params={**shared, **request.job.params})
