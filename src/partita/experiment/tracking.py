"""Trackers: functions that receive every recorded row while a run goes on."""

from __future__ import annotations

import hashlib
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from partita.core.registry import call, find_function
from partita.experiment import run_folder
from partita.record import file_names
from partita.record.metric import Metric, metrics_in
from partita.storage.atomic_files import read_json
from partita.track import TRACKERS, Table, TrackedRun, Tracker
from partita.track.scalars import Totals, scalars, tables, without_clients
from partita.track.settings import sent_settings

Row = Mapping[str, Any]
Config = Mapping[str, Any]
Track = Callable[[Row], None]
NEW_LINE = "\n"
PAUSE = 20.0  # after a failure, a tracker is left alone for this many times the time that the failure took


def describe_run(name: str, config: Config, folder: Path) -> TrackedRun:
    """Return what a built-in tracker learns about a run.

    Args:
        name: The tracker.
        config: The run's config, as nested dicts.
        folder: The run folder.

    Raises:
        RunFolderError: If the folder holds no run that has started.
    """
    identity = run_folder.verify(folder)
    if identity is None:
        raise run_folder.RunFolderError(f"{folder} holds no run that has started")
    track = config.get("track", {})
    return TrackedRun(
        id=hashlib.blake2b(identity.encode(), digest_size=8, person=b"partita track").hexdigest(),
        project=str(track.get("project") or "partita"),
        name=str(track.get("name") or f"{config['label']} seed {config['seed']}"),
        group=str(track.get("group") or ""),
        settings=sent_settings(config),
        folder=folder / file_names.TRACK / name,
    )


class RowSender:
    """Sends the rows of a run to a built-in tracker: each once, and when no crash can undo its round any more.

    A round is run again after a crash unless a checkpoint covers it, so rows wait for the next checkpoint. Rows that
    the tracker misses, because the process was killed or the tracker failed, are sent before the others.

    Args:
        name: The tracker.
        config: The run's config, as nested dicts.
        folder: The run folder.
        rows: The rows that are recorded already.
        metrics: The metrics of the run.
    """

    def __init__(
        self, name: str, config: Config, folder: Path, rows: Iterable[Row], metrics: Sequence[Metric] = ()
    ) -> None:
        self.name, self.folder, self.metrics = name, folder, metrics
        self.run = describe_run(name, config, folder)
        self.hides_clients = config.get("privacy", {}).get("unit") == "client"
        self.totals, self.waiting = Totals(), deque[tuple[int, dict[str, float], dict[str, Table]]]()
        self.tracker: Tracker | None = None
        self.pause_until = 0.0
        for row in rows:
            self._add(row)

    def __call__(self, row: Row) -> None:
        """Add a row, and send all rows that a checkpoint covers. A failure gives a warning."""
        self._add(row)
        self.send(run_folder.saved_rounds(self.folder))

    def send(self, rounds: int) -> None:
        """Send the rows of the first `rounds` rounds that the tracker does not have. A failure gives a warning."""
        began = time.monotonic()
        if began < self.pause_until:
            return
        try:
            with redirect_stdout(sys.stderr):  # libraries print, and standard output is for results
                self._send(rounds)
        except Exception as error:  # a tracker that fails must not end a run that may have taken days
            now = time.monotonic()
            self.pause_until = now + PAUSE * (now - began)
            self._warn(error)

    def close(self) -> None:
        """Send the remaining rows and close the tracker. A failure gives a warning."""
        self.pause_until = 0.0
        self.send(run_folder.saved_rounds(self.folder))
        try:
            if self.tracker is not None:
                with redirect_stdout(sys.stderr):
                    self.tracker.close(run_folder.finished(self.folder) is not None)
        except Exception as error:
            self._warn(error)

    def _add(self, row: Row) -> None:
        row = without_clients(row) if self.hides_clients else row
        shown = {**scalars(row, self.metrics), **self.totals.add(row)}
        self.waiting.append((row["round"], shown, tables(row)))

    def _send(self, rounds: int) -> None:
        if self.tracker is None:
            self.tracker = find_function("tracker", self.name)(self.run)
        while self.waiting and self.waiting[0][0] < rounds:
            if self.waiting[0][0] >= self.tracker.first:
                self.tracker.log(*self.waiting[0])
            self.waiting.popleft()

    def _warn(self, error: Exception) -> None:
        failure = f"the tracker '{self.name}' failed: {type(error).__name__}: {str(error).partition(NEW_LINE)[0]}"
        warnings.warn(f"{failure}; rows that it misses are sent with the next ones", stacklevel=3)


@contextmanager
def open_trackers(names: Sequence[str], config: Config, folder: Path) -> Iterator[Track]:
    """Open all trackers, and close them at the end. Yield a function that passes a row to all of them.

    The user's own tracker is a function `(config, folder) -> (row) -> None`. It is called once at each start of the
    run, and what it returns for each recorded round. A round that a crash lost is run and passed again. If what it
    returns has a method `close`, this is called at the end.

    Args:
        names: Built-in trackers, "file.py:function", or names that packages register.
        config: The run's config, as nested dicts.
        folder: The run folder.

    Raises:
        CodeError: If the user's own tracker does not return a function.
    """
    opened: dict[str, Track] = {}
    for name in names:
        if name in TRACKERS:
            sender = RowSender(name, config, folder, run_folder.read_rows(folder), metrics_of(folder))
            sender.send(run_folder.saved_rounds(folder))
            opened[name] = sender
        else:
            opened[name] = call("tracker", name, config, folder)

    def track_all(row: Row) -> None:
        for name, track in opened.items():
            with _only_warn(name, f"in round {row['round']}"):
                track(row)

    try:
        yield track_all
    finally:
        for name, track in opened.items():
            with _only_warn(name, "at the end"):
                getattr(track, "close", lambda: None)()


@contextmanager
def _only_warn(name: str, when: str) -> Iterator[None]:
    """Turn an error of a tracker into a warning: it must not end a run that may have taken days."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"the tracker '{name}' failed {when}: {type(error).__name__}: {error}", stacklevel=4)


def metrics_of(folder: Path) -> tuple[Metric, ...]:
    """Return the metrics of a run."""
    with run_folder.expect_format(folder / file_names.PLAN):
        return metrics_in(read_json(folder / file_names.PLAN))
