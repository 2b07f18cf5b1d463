"""Progress of running experiments: bars on a terminal and in a notebook, lines on standard error in a log."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from partita.core.given import is_given
from partita.record.row import Row
from partita.storage.safe_text import printable

if TYPE_CHECKING:
    from partita.experiment.compare import Planned, Status
    from partita.experiment.config import Config
    from partita.experiment.progress_file import OnReply
    from partita.record.metric import Metric

HEARTBEAT = 60.0  # seconds after which a log gets a line, even if no round was tested
LABEL_SHOWN = 60  # characters of a label that a line of progress shows


class Verbosity(Enum):
    """How much a command prints while it runs. Warnings and errors are always printed."""

    QUIET = 0
    NORMAL = 1
    VERBOSE = 2


class Display:
    """A progress bar if standard error is a terminal, and in a notebook; otherwise lines of a log.

    Args:
        verbosity: How much to print.
        description: What runs.
        total: The number of rounds.
        done: Rounds that are already finished.
    """

    def __init__(self, verbosity: Verbosity, description: str, total: int, done: int = 0) -> None:
        console = Console(stderr=True)
        self.verbosity, self.total, self.first = verbosity, total, done
        in_notebook = console.is_jupyter and find_spec("ipywidgets") is not None  # with which rich draws there
        self.has_bar = (console.is_terminal or in_notebook) and verbosity is not Verbosity.QUIET
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds{task.fields[clients]}"),
            TextColumn("{task.fields[rate]}", style="progress.data.speed"),
            TimeRemainingColumn(),
            console=console,
            disable=not self.has_bar,
        )
        self.task = self.bar.add_task(shorten(description), total=total, completed=done, clients="", rate="")
        self.started: float | None = None
        self.last_line = time.monotonic()

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def update(self, done: float, description: str | None = None, clients: str = "") -> None:
        """Move the bar to `done` rounds."""
        rate = f"{pace:.2g} s/round" if (pace := self.seconds_per_round(done)) else ""
        self.bar.update(
            self.task, completed=done, description=description and shorten(description), clients=clients, rate=rate
        )

    def begin(self, ago: float = 0.0) -> None:
        """Start the clock for the time per round, if it is not running yet: the first round began `ago` seconds ago."""
        self.started = self.started or time.monotonic() - ago

    def seconds_per_round(self, done: float) -> float | None:
        """Return the mean time of the rounds since the start of the clock; None if there is none yet."""
        if self.started is None or done <= self.first:
            return None
        return (time.monotonic() - self.started) / (done - self.first)

    def pace(self, done: float) -> str:
        """Return the time per round and the time left as the end of a line."""
        each = self.seconds_per_round(done)
        if each is None:
            return ""
        left = f", {duration(each * (self.total - done))} left" if done < self.total else ""
        return f", {each:.2g} s per round{left}"

    def line(self, text: str) -> None:
        """Print a line, also above a bar."""
        self._print(text, None)
        self.last_line = time.monotonic()

    def warn(self, text: str) -> None:
        """Print a line that even `--quiet` shows."""
        self._print(text, "yellow")

    def is_due(self) -> bool:
        """Whether a log has had no line for long."""
        return not self.has_bar and time.monotonic() - self.last_line >= HEARTBEAT

    def _print(self, text: str, style: str | None) -> None:
        if self.has_bar:
            self.bar.console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)
        else:
            print(printable(text), file=sys.stderr, flush=True)


def follow(
    begin: Callable[[OnReply | None], Iterator[Row]],
    settings: Config,
    folder: Path,
    resumed: int | None,
    verbosity: Verbosity,
) -> None:
    """Consume a run's rows and show its progress.

    If the run stops with an exception, a note on it says how many rounds are saved and how to resume.

    Args:
        begin: Starts the run and returns its rows. It gets a function that is called for every reply of a client.
        settings: The run's config.
        folder: The run folder.
        resumed: Rounds of the run that are already saved; None if it starts now.
        verbosity: How much to print.
    """
    from partita.experiment.run_folder import RunFolderError, changed_at, saved_rounds, stopped
    from partita.experiment.runner import describe_compute
    from partita.report import read_metric

    metric, known, done, before = None, set[str](), resumed or 0, changed_at(folder)
    with Display(verbosity, settings.label, settings.rounds, done) as display:

        def on_reply(replies: int, cohort: int) -> None:
            display.update(done + replies / cohort, clients=f", {replies}/{cohort} clients")

        try:
            for row in begin(on_reply if display.has_bar else None):
                display.begin(row["seconds"] or 0.0)
                if metric is None:
                    metric = read_metric(folder)
                    for text in _privacy_notes(settings, folder):
                        display.warn(text)
                    if verbosity is Verbosity.VERBOSE:
                        display.line(describe_compute(settings, folder))
                done = row["round"] + 1
                place = f"round {done}/{settings.rounds}"
                display.update(done, settings.label + _score(row, metric) + _epsilon(row))
                if verbosity is Verbosity.VERBOSE or (
                    verbosity is Verbosity.NORMAL and not display.has_bar and (row["test"] or display.is_due())
                ):
                    more = _details(row) if verbosity is Verbosity.VERBOSE else ""
                    text = f"{shorten(settings.label)}: {place}{_score(row, metric)}{_epsilon(row)}"
                    display.line(text + more + display.pace(done))
                for client, reason in row["lost"].items():
                    display.warn(f"{place}: lost {client}: {reason}")
                raised = row.get("alarms", {})
                for kind in sorted(raised.keys() - known):  # print an alarm once while it persists
                    display.warn(f"{place}: {kind}: {raised[kind]}")
                # An alarm on the test persists over the rounds without one.
                known = set(raised) | (set() if row["test"] else known & {"one predicted class"})
            if verbosity is not Verbosity.QUIET and (early := stopped(folder)):
                display.line(f"{shorten(settings.label)}: {early}")
        except BaseException as error:
            begun = resumed is not None or changed_at(folder) != before  # otherwise the folder may hold another run
            kept = saved_rounds(folder)
            if begun and not isinstance(error, RunFolderError) and (kept or not isinstance(error, Exception)):
                held = any(is_given(table.get("path")) for table in (settings.data, settings.model))
                how = "partita.fit(..., resume=True)" if held else f"partita resume {shlex.quote(str(folder))}"
                error.add_note(f"{kept} of {settings.rounds} rounds are saved in {folder}; continue with: {how}")
            raise


def follow_all(statuses: Iterator[Status], planned: Sequence[Planned], verbosity: Verbosity) -> None:
    """Consume the statuses of a comparison and show its progress.

    If the comparison stops with an exception, a note on it says how to continue.

    Args:
        statuses: The statuses.
        planned: All runs of the comparison.
        verbosity: How much to print.
    """
    from partita.experiment import run_folder
    from partita.report import read_metric

    total, count = sum(settings.rounds for _, settings in planned), 0
    shown = {folder: run_folder.count_rows(folder) for folder, _ in planned}
    with Display(verbosity, f"{len(planned)} runs", total) as display:
        try:
            for status in statuses:
                if not count and display.started is None:
                    display.first = status.rounds
                    display.begin()
                count += len(status.finished)
                display.update(status.rounds)
                for folder, settings in planned if verbosity is Verbosity.VERBOSE else ():
                    if run_folder.count_rows(folder) < shown[folder]:  # the run was overwritten
                        shown[folder] = 0
                    for row in islice(run_folder.read_rows(folder), shown[folder], None):
                        shown[folder] += 1
                        place = f"seed {settings.seed}, round {row['round'] + 1}/{settings.rounds}"
                        told = f"{_score(row, read_metric(folder))}{_epsilon(row)}{_details(row)}"
                        display.line(f"{shorten(settings.label)}: {place}{told}")
                for folder, settings in status.finished if verbosity is not Verbosity.QUIET else ():
                    last: Row = {"test": (run_folder.finished(folder) or {}).get("test")}
                    told = f"finished{_score(last, read_metric(folder))} ({count} of {len(planned)} runs)"
                    display.line(f"{shorten(settings.label)}: seed {settings.seed}, {told}")
                    if early := run_folder.stopped(folder):
                        display.line(f"{shorten(settings.label)}: seed {settings.seed}, {early}")
                if verbosity is not Verbosity.QUIET and display.is_due():
                    so_far = f"{status.rounds} of {total} rounds, {count} of {len(planned)} runs finished"
                    display.line(so_far + display.pace(status.rounds))
        except BaseException as error:
            ended = sum(run_folder.finished(folder) is not None for folder, _ in planned)
            error.add_note(f"{ended} of {len(planned)} runs are finished; start the same command again to continue")
            raise


def _score(row: Row, metric: Metric) -> str:
    scores = row.get("test")
    return f", {metric.name} {metric.show(scores.get(metric.name))}" if scores else ""


def _epsilon(row: Row) -> str:
    spent = (row.get("privacy") or {}).get("epsilon")
    return "" if spent is None else f", ε {spent:.3g}"


def _details(row: Row) -> str:
    """Return the training loss, the bytes and the smallest and largest drift of a round, as far as they are known."""
    parts = [] if row.get("train_loss") is None else [f"training loss {row['train_loss']:.3g}"]
    parts += [f"{count / 1e6:.3g} MB {way}" for way, count in (row.get("bytes") or {}).items()]
    drift = {tag: measures["dispersion"] or 0.0 for tag, measures in (row.get("drift") or {}).items() if measures}
    if drift:
        low, high = min(drift, key=drift.__getitem__), max(drift, key=drift.__getitem__)
        parts.append(f"drift {drift[low]:.2g} ({low}) to {drift[high]:.2g} ({high})")
    return "".join(f", {part}" for part in parts)


def shorten(label: str) -> str:
    """Return a label for a line of progress."""
    text = printable(label)
    return text if len(text) <= LABEL_SHOWN else f"{text[: LABEL_SHOWN - 1]}…"


def duration(seconds: float) -> str:
    """Return a duration in one or two units, such as "1 h 20 min"."""
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _privacy_notes(settings: Config, folder: Path) -> Iterator[str]:
    """Yield notes on the noise of a private run for its owner."""
    from partita.privacy.secret import FILE

    if settings.privacy and settings.privacy.repeatable:
        yield "privacy.repeatable is set: anyone can recompute the noise from the seed, so epsilon is a simulation"
    elif (folder / FILE).exists():
        yield f"the noise depends on this run's secret, {folder / FILE}: keep it private; resuming the run needs it"
