"""Prefork server for Flower's programs. It imports all modules once and forks for each program that Flower starts.

Flower starts a new program for every message, so a short round consists mostly of imports. Here, small programs with
the names of Flower's come first on PATH. Each passes its arguments to the prefork server, and a fork of the server
does the work. Messages are still handled in separate processes, so they share no more state than without the server.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

# Poll interval of Flower's launcher in seconds. Flower's default is 1.
QUICK = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}

PROGRAMS = ("flwr", "flwr-clientapp", "flwr-serverapp", "flower-superexec", "flower-superlink", "flower-supernode")
FLOWER = ("flwr.cli.app", "flwr.supernode.cli", "flwr.superlink.cli", "flwr.supercore.cli")
CLIENT_MODULE = Path(__file__).with_name("prefork_client.py")


@contextmanager
def start_prefork_server(
    modules: Sequence[str], environment: Mapping[str, str], log: Path | None = None
) -> Iterator[dict[str, str]]:
    """Run a prefork server while the context is open.

    Args:
        modules: Modules to import in addition to Flower's.
        environment: The environment of the server and the programs.
        log: File for the server's output. Default: this process's output.

    Yields:
        The environment in which Flower's programs use the server.
    """
    folder = Path(tempfile.mkdtemp(prefix="warm-"))  # private, and short: a socket path is limited to 100 characters
    for name in PROGRAMS:
        program, original = folder / name, Path(sys.executable).with_name(name)
        program.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -IS "{CLIENT_MODULE}" "{folder / "door"}" "{original}" "$@"\n'
        )
        program.chmod(0o700)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        with socket.socket(socket.AF_UNIX) as listener:
            # Listen before importing anything, so that early connections wait instead of failing.
            listener.bind(str(folder / "door"))
            listener.listen(64)
            command = [
                sys.executable,
                "-m",
                "partita.engines.flower.prefork_server",
                str(listener.fileno()),
                *FLOWER,
                *modules,
            ]
            output = stack.enter_context(log.open("wb")) if log else None
            server = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=output,
                pass_fds=[listener.fileno()], process_group=0,
            )  # fmt: skip
        stack.enter_context(server)
        stack.callback(_kill, server)
        yield {**QUICK, **environment, "PATH": f"{folder}{os.pathsep}{environment['PATH']}"}


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main(handle: str, *modules: str) -> None:
    """Import the modules, then fork for each connection on the socket with file descriptor `handle`."""
    for module in modules:
        import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies: the forks' exit status is not needed
    with socket.socket(fileno=int(handle)) as listener:
        # Nothing is ever written to stdin. It becomes readable (EOF) when the parent ends, even if it is killed.
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                run_program(connection)
            connection.close()


def run_program(connection: socket.socket) -> NoReturn:
    """Run the caller's program in this fork, with the caller's arguments, files, folder and environment."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, handles, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as lines:
        request: dict[str, Any] = json.loads(lines.readline())
    for place, handle in enumerate(handles):
        os.dup2(handle, place)
        os.close(handle)
    with suppress(PermissionError):  # a process can join a group of its own session only
        os.setpgid(0, os.getpgid(request["pid"]))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    threading.Thread(target=_exit_with_caller, args=(connection,), daemon=True).start()
    sys.argv = request["words"]
    name = Path(sys.argv[0]).name
    [program] = entry_points(group="console_scripts", name=name)
    try:
        program.load()()
    except SystemExit as end:
        with suppress(OSError):
            connection.sendall(bytes([end.code % 256 if isinstance(end.code, int) else bool(end.code)]))
        raise
    connection.sendall(b"\0")
    sys.exit(0)


def _exit_with_caller(connection: socket.socket) -> None:
    """Kill this process when the caller's end of the socket closes."""
    if not connection.recv(1):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
