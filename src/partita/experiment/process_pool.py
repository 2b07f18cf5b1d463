"""Run tasks in parallel processes that end with this one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from partita.engines.ipc import ctrl_c_is_for_parent, end_with_parent

INTERVAL = 0.5  # seconds between two reports


def run_in_processes(
    work: Callable[..., None], tasks: Mapping[str, tuple[Any, ...]], jobs: int
) -> Iterator[tuple[str, ...]]:
    """Call a function for every task, in spawned processes.

    Args:
        work: The function, at the top level of a module.
        tasks: Its arguments, by the name of the task in errors.
        jobs: Maximum number of processes.

    Yields:
        The names of the tasks that finished since the last time, every half second.

    Raises:
        OSError: If a process died. Any other error of a task is raised again with the task's name.
    """
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), end_with_parent)
    others = multiprocessing.active_children()
    try:
        with ctrl_c_is_for_parent():
            futures = {pool.submit(work, *arguments): name for name, arguments in tasks.items()}
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, timeout=INTERVAL, return_when=FIRST_EXCEPTION)
            for future in done:
                try:
                    future.result()
                except BrokenProcessPool as error:
                    raise OSError(
                        "the process of a run died (out of memory?); start the same command again to continue"
                    ) from error
                except Exception as error:
                    error.args = (f"{futures[future]}: {error}", *error.args[1:])
                    raise
            yield tuple(futures[future] for future in done)
    except BaseException:
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()  # do not wait for the run's end; the rounds it has saved are kept
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
