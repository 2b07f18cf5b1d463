"""`partita flower`: write a run as a Flower app, and try it out on this machine."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Run on many machines with Flower.", no_args_is_help=True, pretty_exceptions_enable=False)

App = Annotated[Path, typer.Argument(help="The app's folder.")]
LOAD = ["partita.experiment.flower_app", "partita.models.vit", "partita.models.pretrained"]
Clients = Annotated[int | None, typer.Option(help="How many clients to wait for; all of the split's unless said.")]


@app.command()
def init(
    folder: App,
    config: Annotated[Path, typer.Option("--config", "-c", help="The experiment, in TOML.")],
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change a key: --set method.mu=0.1.")] = None,
    clients: Clients = None,
) -> None:
    """Write an app that 'flwr run' takes."""
    _need_flower()
    from partita.experiment.flower_app import init as write

    write(folder, config, changes or (), clients)
    print(f"wrote {folder}; try it out with: partita flower up {folder} --run")


@app.command()
def up(
    folder: App,
    clients: Clients = None,
    logs: Annotated[Path, typer.Option(help="Where the processes log, and where clients keep their state.")] = Path(
        "runs/flower"
    ),
    run: Annotated[
        bool, typer.Option("--run", help="Run the app once and stop, instead of waiting for Ctrl-C.")
    ] = False,
) -> None:
    """Start a SuperLink and a SuperNode for each client on this machine."""
    _need_flower()
    from partita.engines.flower.local_deployment import DeploymentError, deploy_locally
    from partita.experiment import run_folder
    from partita.experiment.flower_app import FlowerError, modules, population, recorded_folder

    _leave_nothing_behind()
    names = population(folder)[:clients]
    with deploy_locally(names, logs, modules(folder)) as here:
        print(f"SuperLink and {len(names)} SuperNodes are up; logs and clients' folders in {here.folder}")
        settings = f"clients={len(names)}"
        if run:
            here.run(folder, settings)
            # Flower reports success also where a run failed.
            if run_folder.finished(recorded_folder(folder)) is None:
                raise FlowerError(f"the run did not finish; the log above says why, and those in {here.folder}")
            return
        home = here.environment["FLWR_HOME"]
        print(f"run the app with: FLWR_HOME={home} flwr run {folder} loopback --stream --run-config {settings}")
        print("stop with Ctrl-C")
        here.link.wait()
        raise DeploymentError(f"the SuperLink has ended; {here.folder / 'superlink.log'} says why")


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def warm(
    command: Annotated[list[str], typer.Argument(help="flower-supernode or flower-superlink, with its options.")],
    load: Annotated[list[str], typer.Option(help="A module to import beforehand; give it again for more.")] = LOAD,
) -> None:
    """Run a SuperNode whose messages are answered without importing everything anew."""
    _need_flower()
    from partita.engines.flower.local_deployment import current_environment, find_executable, terminate
    from partita.engines.flower.prefork_server import start_prefork_server as warmed

    _leave_nothing_behind()
    with warmed(load, current_environment()) as environment:
        node = subprocess.Popen(
            [find_executable(command[0], environment), *command[1:]], env=environment, process_group=0
        )
        try:
            status = node.wait()
        finally:
            terminate([node])
    raise typer.Exit(status)


def _leave_nothing_behind() -> None:
    """Also when started in the background, where Ctrl-C is ignored, no process may be left behind."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def _need_flower() -> None:
    if find_spec("flwr") is None:
        raise ValueError("this needs Flower; install it with: pip install 'partita[flower]'")
