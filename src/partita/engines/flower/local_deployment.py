"""A whole federation on this machine, for tests: a SuperLink process and one SuperNode process per client."""

from __future__ import annotations

import json
import os
import secrets
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

from partita.storage.processes import end_with_parent
from partita.storage.safe_text import path_component

WAIT = 120.0  # seconds for the SuperLink to start
PATIENCE = 10.0  # seconds for a process to exit after SIGTERM

# No telemetry, no update checks, and no app installs packages.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
QUICK = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}  # seconds after which the SuperLink starts a run; Flower waits 1


class DeploymentError(ValueError):
    """The local federation did not start."""


@dataclass(frozen=True)
class LocalDeployment:
    """A running local federation."""

    folder: Path  # logs and client folders
    environment: Mapping[str, str]  # for Flower's programs
    link: subprocess.Popen[bytes]  # the SuperLink
    nodes: Mapping[str, subprocess.Popen[bytes]]  # client -> its SuperNode

    def run(self, app: Path, settings: str) -> None:
        """Run the app to completion and print its log to the terminal.

        Args:
            app: The folder of the Flower app.
            settings: Values for the app's run config, as `--run-config` takes them.

        Raises:
            DeploymentError: If Flower does not accept the app or the run config.
        """
        command = [
            find_executable("flwr", self.environment),
            "run",
            str(app),
            "loopback",
            "--stream",
            "--run-config",
            settings,
        ]
        status = subprocess.run(command, env=self.environment).returncode
        if status:
            raise DeploymentError(f"'flwr run' exited with status {status}; see its output above")


@contextmanager
def deploy_locally(
    clients: Sequence[str],
    folder: Path,
    modules: Sequence[str] = (),
    gate: Callable[[int], int] = lambda port: port,
) -> Iterator[LocalDeployment]:
    """Start a SuperLink, one SuperNode per client, and a process that answers for all of them.

    All processes have ended when the context exits.

    Args:
        clients: The clients' names.
        folder: Folder for logs and client state.
        modules: Modules that the answering process imports before the first message.
        gate: Maps the SuperLink's port to the port that the SuperNodes connect to.

    Raises:
        DeploymentError: If the SuperLink did not start.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    port, *node_ports = free_ports(1 + len(clients))
    with ExitStack() as stack:
        environment = _environment(folder, port)
        secret_file = folder / "flwr" / "secret"
        secret_file.touch(mode=0o600)
        secret_file.write_bytes(secrets.token_bytes(32))
        running: list[subprocess.Popen[bytes]] = []
        stack.callback(terminate, running)

        def launch(log: Path, *command: str) -> subprocess.Popen[bytes]:
            log.unlink(missing_ok=True)
            with log.open("ab") as output:  # a SuperNode and the process that answers for it both append
                # Its own process group, so that its child processes can be ended with it.
                process = subprocess.Popen(
                    [find_executable(command[0], environment), *command[1:]],
                    env=environment,
                    stdout=output,
                    stderr=output,
                    process_group=0,
                    preexec_fn=end_with_parent,
                )
            running.append(process)
            return process

        listen = ("--insecure", "--host", "127.0.0.1", "--port")
        link = launch(
            folder / "superlink.log", "flower-superlink", *listen, str(port),
            "--disable-runtime-dependency-installation",
        )  # fmt: skip
        _wait_until_healthy(link, port, folder / "superlink.log")
        started, places, target_port = {}, list[str](), gate(port)
        for client, node_port in zip(clients, node_ports, strict=True):
            log = folder / f"{path_component(client)}.log"
            config = f'client={json.dumps(client)} folder="{folder / "sites"}"'
            tasks = ("--isolation", "process", "--superexec-auth-secret-file", str(secret_file))
            address = ("--superlink", f"127.0.0.1:{target_port}", "--node-config", config)
            started[client] = launch(log, "flower-supernode", *listen, str(node_port), *tasks, *address)
            places += [str(node_port), str(log)]
        words = (str(secret_file), str(len(started)), *places, *modules)
        launch(folder / "sites.log", sys.executable, "-m", "partita.engines.flower.local_sites", *words)
        yield LocalDeployment(folder, environment, link, started)


def current_environment() -> dict[str, str]:
    """Return this process's environment, with the folder of its Python executable first on PATH."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def _environment(folder: Path, port: int) -> dict[str, str]:
    """Write the config in FLWR_HOME by which Flower finds its SuperLink, and return the environment."""
    home = folder / "flwr"
    home.mkdir(exist_ok=True)
    address = f'address = "127.0.0.1:{port}"\ninsecure = true\n'
    (home / "config.toml").write_text(f'[superlink]\ndefault = "loopback"\n\n[superlink.loopback]\n{address}')
    # Several clients share this machine. If each used all cores, all would be slower.
    return {"OMP_NUM_THREADS": "1", **QUICK, **current_environment(), **QUIET, "FLWR_HOME": str(home)}


def find_executable(name: str, environment: Mapping[str, str]) -> str:
    """Find the Flower program `name` on the environment's PATH.

    Raises:
        DeploymentError: If the program is not installed.
    """
    path = shutil.which(name, path=environment["PATH"])
    if path is None:
        raise DeploymentError(f"{name} was not found; install Flower with: pip install 'partita[flower]'")
    return path


def free_ports(count: int) -> list[int]:
    """Return distinct TCP ports on the loopback interface that are free at the moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def _wait_until_healthy(link: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + WAIT
    while link.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.2)
    raise DeploymentError(f"the SuperLink did not start; see {log}")


def terminate(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the process groups: SIGTERM first, then SIGKILL for those still alive after `PATIENCE` seconds."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal_number)
        end = time.monotonic() + PATIENCE
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
    for process in processes:
        process.wait()
