"""`partita track`: send recorded runs to trackers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from partita.cli.completion import complete_tracker
from partita.storage.safe_text import printable


def register(app: typer.Typer) -> None:
    """Add the command of this file to the app."""
    app.command()(track)


def track(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders that contain run folders.")],
    to: Annotated[
        list[str],
        typer.Option(
            "--to", help="tensorboard, wandb, mlflow or trackio. Repeatable.", autocompletion=complete_tracker
        ),
    ],
    project: Annotated[str | None, typer.Option(help="Project. Default: that of the run.")] = None,
    group: Annotated[
        str | None, typer.Option(help="Group. Default: that of the run, or the folder that contains several runs.")
    ] = None,
) -> None:
    """Send recorded runs to trackers. Rounds that a tracker has already are not sent again."""
    from partita.core.options import OptionError, closest_match
    from partita.experiment import run_folder
    from partita.experiment.tracking import RowSender
    from partita.report import load_run
    from partita.report.load import find
    from partita.track import TRACKERS, check_installed

    for name in to:
        if name not in TRACKERS:
            raise OptionError(f"--to is '{name}'; {closest_match(name, TRACKERS)}")
        check_installed(name)
    for parent in folders:
        found = find(parent)
        for folder in found:
            record = load_run(folder)
            given = {key: value for key, value in {"project": project, "group": group}.items() if value is not None}
            default = {} if found == [parent] else {"group": parent.resolve().name}
            recorded = {key: value for key, value in record.config.get("track", {}).items() if value != ""}
            config = {**record.config, "track": {**default, **recorded, **given}}
            with run_folder.lock(folder), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a failure ends the command instead
                for name in to:
                    sender = RowSender(name, config, folder, record.rows, record.metrics)
                    sender.close()
                    if sender.failure:
                        raise OSError(f"{folder} was not sent: {sender.failure}")
            print(printable(f"{folder}: sent {len(record.rows) - len(sender.waiting)} rounds to {' and '.join(to)}"))
