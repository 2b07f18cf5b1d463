"""`partita flower`: write a run as a Flower app and try it out on this machine."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from partita.cli.options import Changes, ConfigFile

app = typer.Typer(help="Run across several machines with Flower.", no_args_is_help=True, pretty_exceptions_enable=False)

App = Annotated[Path, typer.Argument(help="Folder of the Flower app.")]
Clients = Annotated[int | None, typer.Option(help="Number of clients to wait for. Default: all clients of the split.")]


@app.command()
def init(
    folder: App,
    config: ConfigFile,
    changes: Changes = None,
    clients: Clients = None,
) -> None:
    """Write a Flower app for 'flwr run'."""
    require_flower()
    from partita.experiment.flower_app import init as write

    write(folder, config, changes or (), clients)
    print(f"wrote {folder}; try it out with: partita flower up {folder} --run")


@app.command()
def up(
    folder: App,
    clients: Clients = None,
    logs: Annotated[Path, typer.Option(help="Folder for process logs and client state.")] = Path("runs/flower"),
    run: Annotated[bool, typer.Option("--run", help="Run the app once and exit, instead of waiting for Ctrl-C.")] = (
        False
    ),
    out: Annotated[Path | None, typer.Option(help="Run folder. Default: 'folder' in the app's pyproject.toml.")] = None,
) -> None:
    """Start a SuperLink and one SuperNode per client on this machine."""
    require_flower()
    from partita.engines.flower.local_deployment import DeploymentError, deploy_locally
    from partita.experiment import run_folder
    from partita.experiment.flower_app import FlowerError, check_run_folder, modules, population, run_config

    _exit_cleanly_on_signals()
    record = out.resolve() if out else Path(run_config(folder)["folder"])
    if run:
        check_run_folder(folder, record)
    names = population(folder)[:clients]
    with deploy_locally(names, logs, modules(folder)) as deployment:
        print(f"SuperLink and {len(names)} SuperNodes are up; logs and client folders are in {deployment.folder}")
        settings = f"clients={len(names)} folder={json.dumps(str(record), ensure_ascii=False)}"
        if run:
            deployment.run(folder, settings)
            # Flower reports success even if the run failed.
            if run_folder.finished(record) is None:
                raise FlowerError(f"the run did not finish; see the log above and the logs in {deployment.folder}")
            return
        home = deployment.environment["FLWR_HOME"]
        command = f"flwr run {shlex.quote(str(folder))} loopback --stream --run-config {shlex.quote(settings)}"
        print(f"run the app with: FLWR_HOME={shlex.quote(home)} {command}")
        print("stop with Ctrl-C")
        deployment.link.wait()
        raise DeploymentError(f"the SuperLink exited; see {deployment.folder / 'superlink.log'}")


def _exit_cleanly_on_signals() -> None:
    """Exit cleanly on SIGINT and SIGTERM, so that no child process survives.

    A background job starts with SIGINT ignored, so the handler is set explicitly.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def require_flower() -> None:
    """Refuse a command that needs Flower if it is not installed."""
    if find_spec("flwr") is None:
        raise ValueError("this needs Flower; install it with: pip install 'partita[flower]'")
