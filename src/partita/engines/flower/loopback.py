"""A whole federation on this machine, for trying out: a SuperLink and a SuperNode for each client, as processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

WAIT = 60.0  # seconds for the SuperLink to come up
PATIENCE = 10.0  # seconds for a process to end by itself

# Nothing is sent to others, and no app installs anything.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


class LoopbackError(ValueError):
    """A federation on this machine that does not come up."""


@dataclass(frozen=True)
class Loopback:
    folder: Path
    environment: Mapping[str, str]
    link: subprocess.Popen[bytes]
    nodes: Mapping[str, subprocess.Popen[bytes]]

    def run(self, app: Path, settings: str) -> None:
        """Run the app to its end, with its log on the terminal."""
        command = [_program("flwr"), "run", str(app), "loopback", "--stream", "--run-config", settings]
        subprocess.run(command, env=self.environment, check=True)


@contextmanager
def loopback(clients: Sequence[str], folder: Path, nodes: str = "") -> Iterator[Loopback]:
    """`nodes` is added to every node config. All processes have ended when the block is left, however it is left."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    port, *others = free_ports(1 + len(clients))
    environment = _environment(folder, port)
    with ExitStack() as stack:

        def launch(name: str, *command: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            # A group of its own, so that the processes it starts in turn can be ended with it.
            process = subprocess.Popen(
                [_program(command[0]), *command[1:]], env=environment, stdout=log, stderr=log, start_new_session=True
            )
            stack.callback(end, process)
            return process

        here = ("--insecure", "--host", "127.0.0.1", "--port")
        link = launch("superlink", "flower-superlink", *here, str(port), "--disable-runtime-dependency-installation")
        _await(link, port, folder / "superlink.log")
        started = {}
        for client, own in zip(clients, others, strict=True):
            config = f'client="{client}" folder="{folder / "sites"}" {nodes}'
            address = ("--superlink", f"127.0.0.1:{port}", "--node-config", config)
            started[client] = launch(client, "flower-supernode", *here, str(own), *address)
        yield Loopback(folder, environment, link, started)


def _environment(folder: Path, port: int) -> dict[str, str]:
    """Flower finds its own programs by PATH, and its SuperLink by the config in FLWR_HOME."""
    home = folder / "flwr"
    home.mkdir(exist_ok=True)
    address = f'address = "127.0.0.1:{port}"\ninsecure = true\n'
    (home / "config.toml").write_text(f'[superlink]\ndefault = "loopback"\n\n[superlink.loopback]\n{address}')
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    # Several clients share this machine: each with all its cores would be slower for all.
    return {"OMP_NUM_THREADS": "1", **os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": programs}


def _program(name: str) -> str:
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise LoopbackError(f"{path} does not exist; install Flower with: pip install 'partita[flower]'")
    return str(path)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _await(link: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + WAIT
    while link.poll() is None and time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.2)
    raise LoopbackError(f"the SuperLink does not come up; {log} says why")


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process and all that it started to end, and if they do not, end them."""
    for step in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, step)
        except ProcessLookupError:
            break
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            continue
        time.sleep(0.2)
    process.wait()
