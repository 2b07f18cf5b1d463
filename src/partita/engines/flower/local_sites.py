"""The sites of a federation on one machine: a process imports their modules once, and forks for each message.

Flower would start a program for every message, so a short round would consist mostly of imports.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from importlib import import_module
from pathlib import Path

from flwr.supernode.runtime.run_clientapp import run_clientapp

from partita.engines.flower.task_loop import serve_tasks


def main(secret_file: str, count: str, *words: str) -> None:
    """Answer the tasks of SuperNodes on this machine, with the app of each run, until this process is ended.

    Args:
        secret_file: The secret that the SuperNodes were started with.
        count: Number of SuperNodes.
        *words: Port and log file of each SuperNode, and the modules to import.
    """
    nodes, modules = words[: 2 * int(count)], words[2 * int(count) :]
    for module in modules:
        import_module(module)
    fork = multiprocessing.get_context("fork")
    served = [
        fork.Process(target=_serve, args=(f"127.0.0.1:{port}", Path(secret_file).read_bytes(), log, os.getpid()))
        for port, log in zip(nodes[::2], nodes[1::2], strict=True)
    ]
    for process in served:
        process.start()
    for process in served:
        process.join()


def _serve(address: str, secret: bytes, log: str, parent: int) -> None:
    """Answer the tasks of one SuperNode, and write to its log."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for output in (1, 2):
        os.dup2(file, output)

    def work(token: str, kind: str) -> None:
        run_clientapp(address, token, insecure=True, runtime_dependency_install=False)

    serve_tasks(address, secret, work, lambda: os.getppid() == parent)


if __name__ == "__main__":
    main(*sys.argv[1:])
