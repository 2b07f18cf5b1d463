"""`partita flower`: write a run as a Flower app, and try it out on this machine."""

from __future__ import annotations

import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Run on many machines with Flower.", no_args_is_help=True, pretty_exceptions_enable=False)

App = Annotated[Path, typer.Argument(help="The app's folder.")]
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
    from partita.flower_app import init as write

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
    from partita import record
    from partita.engines.flower.loopback import LoopbackError, loopback
    from partita.flower_app import FlowerError, population, recorded

    # Also when started in the background, where Ctrl-C is ignored, no process may be left behind.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    names = population(folder)[:clients]
    with loopback(names, logs) as here:
        print(f"SuperLink and {len(names)} SuperNodes are up; logs and clients' folders in {here.folder}")
        settings = f"clients={len(names)}"
        if run:
            here.run(folder, settings)
            # Flower reports success also where a run failed.
            if record.finished(recorded(folder)) is None:
                raise FlowerError(f"the run did not finish; the log above says why, and those in {here.folder}")
            return
        home = here.environment["FLWR_HOME"]
        print(f"run the app with: FLWR_HOME={home} flwr run {folder} loopback --stream --run-config {settings}")
        print("stop with Ctrl-C")
        here.link.wait()
        raise LoopbackError(f"the SuperLink has ended; {here.folder / 'superlink.log'} says why")


def _need_flower() -> None:
    if find_spec("flwr") is None:
        raise ValueError("this needs Flower; install it with: pip install 'partita[flower]'")
