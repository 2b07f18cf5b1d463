"""Trackio: the local database that `trackio show` reads, or the server in TRACKIO_SPACE_ID or TRACKIO_SERVER_URL."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from unittest.mock import patch

from partita.track import Table, TrackedRun


class Trackio:
    """Logs to the run of a name that holds a part of the id: Trackio finds runs by their name."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self.trackio = trackio
        # Trackio would ask the Hugging Face Hub for the name of a user who is logged in, also for a local run.
        with redirect_stdout(StringIO()), patch.object(trackio.Run, "_get_username", lambda _: None):
            self.run = trackio.init(
                run.project,
                name=f"{run.name} {run.id[:8]}",
                group=run.group or None,
                config=dict(run.settings),
                resume="allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        self.first: int = self.run._next_step  # Trackio has no public way to ask for it

    def log(self, round: int, scalars: Mapping[str, float], tables: Mapping[str, Table]) -> None:
        """Log a round. A thread of Trackio writes it within half a second."""
        shown = {
            name: self.trackio.Table(list(table[0]), [list(line.values()) for line in table])
            for name, table in tables.items()
        }
        self.run.log({**scalars, **shown}, step=round)

    def close(self, finished: bool) -> None:
        """Write the rest."""
        with redirect_stdout(StringIO()):
            self.trackio.finish()  # unlike `Run.finish`, this also stops Trackio from printing at exit


def open_run(run: TrackedRun) -> Trackio:
    """Open a run."""
    return Trackio(run)
