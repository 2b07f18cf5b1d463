"""Play runs in spawned processes, within a time limit."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from playing.lines import Line
from playing.study import Planned

TRIES = 2  # a run that fails is tried once more, from the beginning
INTERVAL = 0.5  # seconds between two looks at the clock
PATIENCE = 5.0  # seconds that a stopped process has to end before it is killed


@dataclass(frozen=True)
class Ended:
    """A run that has ended.

    Attributes:
        planned: The run.
        line: Its line; None if it failed.
        error: Why it failed, in one line.
        trace: Where.
        last: Whether it will not be tried again in this call.
    """

    planned: Planned
    line: Line | None = None
    error: str = ""
    trace: str = ""
    last: bool = True


@dataclass
class Lengths:
    """How long runs take, learned from those that have finished.

    Attributes:
        earlier: The seconds of runs of earlier calls, by (study, kind, arm) and by (study, kind).
        seconds: The same for runs of this call, which count more: the machine and its load may be others.
    """

    earlier: dict[tuple[str, ...], list[float]] = field(default_factory=dict)
    seconds: dict[tuple[str, ...], list[float]] = field(default_factory=dict)

    def add(self, line: Mapping[str, Any], seconds: float, earlier: bool = False) -> None:
        """Learn from a finished run."""
        for key in self._keys(line["study"], line["kind"], line["arm"]):
            (self.earlier if earlier else self.seconds).setdefault(key, []).append(seconds)

    def expected(self, planned: Planned) -> float | None:
        """Return the longest of the last five runs of the arm, else of the study; None if none has finished."""
        for known in (self.seconds, self.earlier):
            for key in self._keys(planned.study, planned.kind, planned.arm):
                if key in known:
                    return max(known[key][-5:])
        return None

    @staticmethod
    def _keys(study: str, kind: str, arm: str) -> tuple[tuple[str, ...], ...]:
        return (study, kind, arm), (study, kind)


class Worker:
    """A process that plays one run after the other, so that it imports and warms up only once."""

    def __init__(self, work: Path, threads: int, commit: str | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, work, threads, commit), daemon=False)
        with _threads(threads):
            self.process.start()
        theirs.close()
        self.planned: Planned | None = None

    def begin(self, planned: Planned, again: bool) -> None:
        """Give it a run. `again` starts from the beginning, whatever an earlier try has left."""
        self.planned = planned
        self.connection.send((planned, again))

    def result(self) -> tuple[Line | None, str, str]:
        """Return (line, error, trace) of its run."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(PATIENCE)
            code = self.process.exitcode
            return None, f"the process of the run died with exit code {code} (out of memory?)", ""

    def stop(self) -> None:
        """End the process, with its run if it has one."""
        self.connection.close()
        self.process.terminate()
        self.process.join(PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def play_all(
    planned: Sequence[Planned],
    jobs: int,
    work: Path,
    commit: str | None = None,
    deadline: float | None = None,
    lengths: Lengths | None = None,
    tries: Mapping[str, int] | None = None,
) -> Iterator[Ended]:
    """Play runs in order, `jobs` at a time. Yield each as it ends.

    Close the generator, or let an exception pass through it, to end all processes.

    Args:
        planned: The runs.
        jobs: Maximum number of runs at a time.
        work: Folder for the folders of runs.
        commit: The commit of the source, if known.
        deadline: The `time.monotonic()` at which what still runs is killed. Before, no run is started that is not
            expected to end in time.
        lengths: What is known of the length of runs. It learns from those that end.
        tries: By key of a run, how often it has failed in earlier calls.
    """
    lengths = Lengths() if lengths is None else lengths
    waiting, failed = deque(planned), dict(tries or {})
    jobs = min(jobs, len(waiting))
    threads = max(1, len(os.sched_getaffinity(0)) // max(jobs, 1)) if hasattr(os, "sched_getaffinity") else 1
    workers: list[Worker] = []
    try:
        while True:
            while waiting and (chosen := _next(waiting, lengths, deadline)) is not None:
                idle = next((worker for worker in workers if worker.planned is None), None)
                if idle is None and len(workers) == jobs:
                    break
                if idle is None:
                    idle = Worker(work, threads, commit)
                    workers.append(idle)
                waiting.remove(chosen)
                idle.begin(chosen, again=failed.get(chosen.key, 0) > 0)
            busy = [worker for worker in workers if worker.planned is not None]
            left = None if deadline is None else deadline - time.monotonic()
            if not busy or (left is not None and left <= 0):
                return
            ready = wait([worker.connection for worker in busy], INTERVAL if left is None else min(INTERVAL, left))
            for worker in [worker for worker in busy if worker.connection in ready]:
                assert worker.planned is not None
                (line, error, trace), run = worker.result(), worker.planned
                worker.planned = None
                if line is not None:
                    lengths.add(line, line["seconds"])  # without the start of the process, which is not repeated
                    yield Ended(run, line)
                    continue
                worker.stop()  # an error of a GPU spoils the process for the next run
                workers.remove(worker)
                failed[run.key] = failed.get(run.key, 0) + 1
                last = failed[run.key] >= TRIES
                if not last:
                    waiting.append(run)
                yield Ended(run, None, error, trace, last)
    finally:
        for worker in workers:
            worker.stop()


def _next(waiting: deque[Planned], lengths: Lengths, deadline: float | None) -> Planned | None:
    """Return the first run that is expected to end in time; None if there is none."""
    if deadline is None:
        return waiting[0]
    left = deadline - time.monotonic()
    return next((run for run in waiting if (lengths.expected(run) or 0.0) < left), None)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Limit the threads of processes started in this context. Libraries read the variable when they are imported."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _serve(connection: Connection, work: Path, threads: int, commit: str | None) -> None:
    """Play the runs that arrive, until there are no more."""
    import gc
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to children too; the parent ends them
    import torch

    from partita.engines.ipc import end_with_parent
    from playing.work import play

    end_with_parent()
    while True:
        try:
            planned, again = connection.recv()
        except EOFError:
            return
        try:
            answer = play(planned, work, threads, commit, again), "", ""
        except Exception as error:
            answer = None, f"{type(error).__name__}: {error}", traceback.format_exc()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # other processes share the GPU
        try:
            connection.send(answer)
        except (BrokenPipeError, OSError):
            return
