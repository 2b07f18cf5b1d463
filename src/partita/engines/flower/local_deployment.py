"""A whole federation on this machine, for trying out: a SuperLink and a SuperNode for each client, as processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from partita.core.safe_text import path_component
from partita.engines.flower.prefork_server import start_prefork_server

WAIT = 120.0  # seconds for the SuperLink to come up
PATIENCE = 10.0  # seconds for a process to end by itself

# Nothing is sent to others, and no app installs anything.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


class DeploymentError(ValueError):
    """A federation on this machine that does not come up."""


@dataclass(frozen=True)
class LocalDeployment:
    folder: Path
    environment: Mapping[str, str]
    link: subprocess.Popen[bytes]
    nodes: Mapping[str, subprocess.Popen[bytes]]

    def run(self, app: Path, settings: str) -> None:
        """Run the app to its end, with its log on the terminal."""
        command = [
            find_executable("flwr", self.environment),
            "run",
            str(app),
            "loopback",
            "--stream",
            "--run-config",
            settings,
        ]
        subprocess.run(command, env=self.environment, check=True)


@contextmanager
def deploy_locally(
    clients: Sequence[str],
    folder: Path,
    modules: Sequence[str] | None = None,
    nodes: str = "",
    gate: Callable[[int], int] = lambda port: port,
) -> Iterator[LocalDeployment]:
    """All processes have ended when the block is left, however it is left.

    With `modules`, one process imports these and Flower, and all others are its forks. `nodes` is added to every node
    config. `gate` says on which port sites call, given the SuperLink's own.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    port, *others = free_ports(1 + len(clients))
    with ExitStack() as stack:
        environment = _environment(folder, port)
        if modules is not None:
            environment = stack.enter_context(start_prefork_server(modules, environment, folder / "warm.log"))
        running: list[subprocess.Popen[bytes]] = []
        stack.callback(terminate, running)

        def launch(name: str, *command: str) -> subprocess.Popen[bytes]:
            with (folder / f"{path_component(name)}.log").open("wb") as log:
                # A group of its own, so that the processes it starts in turn can be ended with it.
                process = subprocess.Popen(
                    [find_executable(command[0], environment), *command[1:]],
                    env=environment,
                    stdout=log,
                    stderr=log,
                    process_group=0,
                )
            running.append(process)
            return process

        listen = ("--insecure", "--host", "127.0.0.1", "--port")
        link = launch("superlink", "flower-superlink", *listen, str(port), "--disable-runtime-dependency-installation")
        _await(link, port, folder / "superlink.log")
        started, door = {}, gate(port)
        for client, own in zip(clients, others, strict=True):
            config = f'client={json.dumps(client)} folder="{folder / "sites"}" {nodes}'
            address = ("--superlink", f"127.0.0.1:{door}", "--node-config", config)
            started[client] = launch(client, "flower-supernode", *listen, str(own), *address)
        yield LocalDeployment(folder, environment, link, started)


def current_environment() -> dict[str, str]:
    """The environment of this process, in which the programs installed beside its Python are found first."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def _environment(folder: Path, port: int) -> dict[str, str]:
    """Flower finds its SuperLink by the config in FLWR_HOME."""
    home = folder / "flwr"
    home.mkdir(exist_ok=True)
    address = f'address = "127.0.0.1:{port}"\ninsecure = true\n'
    (home / "config.toml").write_text(f'[superlink]\ndefault = "loopback"\n\n[superlink.loopback]\n{address}')
    # Several clients share this machine: each with all its cores would be slower for all.
    return {"OMP_NUM_THREADS": "1", **current_environment(), **QUIET, "FLWR_HOME": str(home)}


def find_executable(name: str, environment: Mapping[str, str]) -> str:
    path = shutil.which(name, path=environment["PATH"])
    if path is None:
        raise DeploymentError(f"{name} is not found; install Flower with: pip install 'partita[flower]'")
    return path


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
    raise DeploymentError(f"the SuperLink does not come up; {log} says why")


def terminate(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask them and all that they started to end, and end those that do not."""
    for step in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, step)
        until = time.monotonic() + PATIENCE
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
    for process in processes:
        process.wait()
