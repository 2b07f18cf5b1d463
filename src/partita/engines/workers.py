"""Clients of one machine shared out among processes.

Workers are forks of this process: the frozen rest of a model and all data are its memory, held once. What the server
sends lies in memory that all can read, and updates come back through pipes.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait

import torch

from partita.core.learn import ClientFault, ClientState, Job
from partita.core.method import Update
from partita.core.model import Examples
from partita.core.rounds import Lost
from partita.core.run import RunError
from partita.core.store import Memory
from partita.core.tree import Names, Tensors
from partita.engines.embedded import Embedded, chunks

AHEAD = 2  # answers for each worker that may wait for an earlier one: memory stays within bounds


@dataclass(frozen=True)
class Order:
    """A job whose parameters lie in shared memory, but for those made for this client alone."""

    job: Job  # with the latter
    shared: Names
    state: ClientState


@dataclass(frozen=True)
class Answer:
    replies: list[Update | Lost]
    states: dict[str, tuple[int, ClientState]]  # of those that changed


class Workers:
    """An embedded engine in `count` processes of one thread each; the answers are those of the engine itself."""

    def __init__(self, engine: Embedded, count: int) -> None:
        if count < 1:
            raise RunError(f"engine.workers is {count}; it must be at least 1")
        if sys.platform != "linux":
            raise RunError("engine.workers needs processes that share memory by fork, as on Linux; leave it at 1")
        if engine.device.type != "cpu":
            raise RunError("engine.workers is for CPUs; on a GPU set engine.block, which trains clients side by side")
        if engine.wire:
            raise RunError("engine.workers cannot go with real messages, whose copies one process holds")
        self.engine = engine
        self.board = {name: value.clone().share_memory_() for name, value in engine.model.initial.items()}
        self.posted: Tensors = {}  # whose values the board shows
        context = multiprocessing.get_context("fork")
        self.workers: list[Connection] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            context.Process(target=_serve, args=(theirs, engine, self.board), daemon=True).start()
            theirs.close()  # so that a worker's death closes the pipe
            self.workers.append(ours)

    def close(self) -> None:
        for worker in self.workers:
            with suppress(OSError):  # it may be gone already
                worker.send_bytes(b"")
            worker.close()

    def clients(self) -> Sequence[str]:
        return self.engine.clients()

    def train(self, jobs: Iterable[Job]) -> Iterator[Update | Lost]:
        orders = enumerate(chunks(self._orders(jobs), self.engine.block))
        idle, busy, waiting, turn = list(self.workers), dict[Connection, int](), dict[int, Answer](), 0
        try:
            while True:
                while turn in waiting:
                    answer = waiting.pop(turn)
                    turn += 1
                    for client, (round, state) in answer.states.items():
                        self.engine.store.save(client, round, state)
                    yield from answer.replies
                while idle and len(waiting) < AHEAD * len(self.workers) and (order := next(orders, None)):
                    worker = idle.pop()
                    busy[worker] = order[0]
                    with suppress(OSError):  # of one that died, the answer tells
                        worker.send_bytes(pickle.dumps(order[1]))
                if not busy:
                    return
                for ready in wait(list(busy)):
                    worker = next(each for each in busy if each is ready)
                    place = busy.pop(worker)
                    idle.append(worker)
                    waiting[place] = _receive(worker)
        finally:
            # Whoever stops listening leaves no worker reading what the next round will write.
            for worker in busy:
                with suppress(EOFError, OSError):
                    worker.recv_bytes()

    def evaluate(self, jobs: Iterable[Job], on: Examples | None = None) -> Iterator[tuple[str, dict[str, float]]]:
        return self.engine.evaluate(jobs, on)

    def _orders(self, jobs: Iterable[Job]) -> Iterator[Order]:
        used: set[str] = set()
        for job in jobs:
            shared = set()
            for name, value in job.params.items():
                if name not in used and self.posted.get(name) is not value:
                    self.board[name].copy_(value)
                    self.posted[name] = value
                if self.posted[name] is value:
                    shared.add(name)
            used |= shared
            own = {name: value for name, value in job.params.items() if name not in shared}
            state = self.engine.store.load(job.client, job.round)
            yield Order(replace(job, params=own), frozenset(shared), state)


def _receive(worker: Connection) -> Answer:
    try:
        answer = pickle.loads(worker.recv_bytes())
    except (EOFError, OSError) as error:
        raise RunError("a worker process died (out of memory?); lower engine.workers") from error
    if isinstance(answer, Answer):
        return answer
    kind, said = answer
    raise kind(*said)


def _serve(parent: Connection, engine: Embedded, board: Tensors) -> None:
    # One thread: the parent's pool of threads does not live on in a fork.
    torch.set_num_threads(1)
    while message := parent.recv_bytes():
        orders: list[Order] = pickle.loads(message)
        store = engine.store = Memory()
        store.states = {order.job.client: (order.job.round - 1, order.state) for order in orders}
        jobs = [
            replace(order.job, params={**{name: board[name] for name in sorted(order.shared)}, **order.job.params})
            for order in orders
        ]
        answer: object
        try:
            replies = list(engine.train(jobs))
            answer = Answer(replies, {client: store.states[client] for client in store.changed})
        except ClientFault as fault:
            answer = ClientFault, (fault.client, fault.reason)
        except Exception as error:
            answer = type(error), (str(error),)
        parent.send_bytes(pickle.dumps(answer))
