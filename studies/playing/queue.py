"""Play runs in spawned processes, within a time limit."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from time import monotonic

from playing.lines import Line
from playing.study import Planned
from playing.work import play

Play = Callable[[Planned, Path, int, str | None, bool], Line]

TRIES = 2  # a run that fails is tried once more, from the beginning
INTERVAL = 0.5  # seconds between two looks at the clock
SHARED_BYTES = 3 * 2**30  # that each process may keep of what is the same in many runs
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
        earlier: The seconds of runs of earlier calls, by (study, arm) and by (study,).
        seconds: The same for runs of this call, which count more: the machine and its load may be others.
    """

    earlier: dict[tuple[str, ...], list[float]] = field(default_factory=dict)
    seconds: dict[tuple[str, ...], list[float]] = field(default_factory=dict)

    def add(self, study: Path, arm: str, seconds: float, earlier: bool = False) -> None:
        """Learn from a finished run of a study's file."""
        for key in self._keys(study, arm):
            (self.earlier if earlier else self.seconds).setdefault(key, []).append(seconds)

    def expected(self, planned: Planned) -> float | None:
        """Return the longest of the last five runs of the arm, else of the study; None if none has finished."""
        for key in self._keys(planned.file, planned.arm):
            for known in (self.seconds, self.earlier):
                if key in known:
                    return max(known[key][-5:])
        return None

    @staticmethod
    def _keys(study: Path, arm: str) -> tuple[tuple[str, ...], ...]:
        return (str(study), arm), (str(study),)


@dataclass(frozen=True)
class Answer:
    """What a process says of a run: its line, or why it failed, where, and whether the process may be spoiled."""

    line: Line | None
    error: str = ""
    trace: str = ""
    spoiled: bool = False


class Worker:
    """A process that plays one run after the other, so that it imports and warms up only once."""

    def __init__(self, play: Play, work: Path, threads: int, commit: str | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, play, work, threads, commit))
        with _threads(threads):
            self.process.start()
        theirs.close()
        self.planned: Planned | None = None

    def begin(self, planned: Planned, again: bool) -> None:
        """Give it a run. `again` starts from the beginning, whatever an earlier try has left."""
        self.planned = planned
        self.connection.send((planned, again))

    def result(self) -> Answer:
        """Return what came of its run."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(PATIENCE)
            code = self.process.exitcode
            return Answer(None, f"the process of the run died with exit code {code} (out of memory?)", spoiled=True)

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
    play: Play = play,
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
        tries: By name of a run, how often it has failed in earlier calls.
        play: Plays one run, in a process; a function at the top level of a module.
    """
    lengths = Lengths() if lengths is None else lengths
    waiting, failed = deque(planned), dict(tries or {})
    jobs = min(jobs, len(waiting))
    threads = _threads_each(jobs)
    workers: list[Worker] = []
    try:
        while True:
            while waiting and (chosen := _next(waiting, lengths, deadline)) is not None:
                idle = next((worker for worker in workers if worker.planned is None), None)
                if idle is None and len(workers) == jobs:
                    break
                if idle is None:  # started only now: a call may have fewer runs than jobs left
                    idle = Worker(play, work, threads, commit)
                    workers.append(idle)
                waiting.remove(chosen)
                idle.begin(chosen, again=failed.get(chosen.name, 0) > 0)
            busy = [worker for worker in workers if worker.planned is not None]
            left = None if deadline is None else deadline - monotonic()
            if not busy:
                return
            patience = INTERVAL if left is None else max(0.0, min(INTERVAL, left))
            ready = wait([worker.connection for worker in busy], patience)
            for worker in [worker for worker in busy if worker.connection in ready]:
                assert worker.planned is not None
                answer, run = worker.result(), worker.planned
                worker.planned = None
                if answer.line is not None:
                    lengths.add(run.file, run.arm, answer.line["seconds"])  # without the start of the process
                    yield Ended(run, answer.line)
                    continue
                if answer.spoiled:
                    worker.stop()
                    workers.remove(worker)
                failed[run.name] = failed.get(run.name, 0) + 1
                last = failed[run.name] >= TRIES
                if not last:
                    waiting.append(run)
                yield Ended(run, None, answer.error, answer.trace, last)
            if left is not None and left <= 0:  # after a last look at what has ended
                return
    finally:
        for worker in workers:
            worker.stop()


def _next(waiting: deque[Planned], lengths: Lengths, deadline: float | None) -> Planned | None:
    """Return the first run that is expected to end in time; None if there is none."""
    if deadline is None:
        return waiting[0]
    left = deadline - monotonic()
    return next((run for run in waiting if (lengths.expected(run) or 0.0) < left), None)


def _threads_each(jobs: int) -> int:
    """Return the threads of each run: its share of the cores, or OMP_NUM_THREADS where that is less.

    Several calls may share a machine. Each sees all cores, so only the user can say how many are its own.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    limit = os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, cores // max(jobs, 1))
    return min(share, int(limit)) if limit.isdigit() and int(limit) > 0 else share


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


def _serve(connection: Connection, play: Play, work: Path, threads: int, commit: str | None) -> None:
    """Play the runs that arrive, until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to children too; the parent ends them
    Thread(target=_end_with_parent, daemon=True).start()
    _share_between_runs()
    while True:
        try:
            planned, again = connection.recv()
        except EOFError:
            return
        try:
            answer = Answer(play(planned, work, threads, commit, again))
        except Exception as error:
            # After an error of the user's there is nothing wrong with the process. One of a GPU may spoil it.
            spoiled = not isinstance(error, ValueError)
            answer = Answer(None, f"{type(error).__name__}: {error}", traceback.format_exc(), spoiled)
        gc.collect()
        torch = sys.modules.get("torch")
        if torch and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # other processes share the GPU
        try:
            connection.send(answer)
        except OSError:
            return


def _share_between_runs() -> None:
    """Decode images and compute the features of a frozen encoder once in this process, not in every run."""
    from partita.core.sharing import share_between_runs

    share_between_runs(SHARED_BYTES)


def _end_with_parent() -> None:
    """Exit when the parent ends for any reason, since nothing else reads the results."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
