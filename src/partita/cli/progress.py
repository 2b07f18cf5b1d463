"""Progress display for a running experiment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from partita.storage.safe_text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from partita.experiment.config import Config


def follow(rows: Iterator[dict[str, Any]], settings: Config, folder: Path, done: int) -> None:
    """Consume a run's rows and show progress.

    If the run stops with an exception, a note on it says how many rounds are saved and how to resume.

    Args:
        rows: The run's rows, one per round.
        settings: The run's config.
        folder: The run folder.
        done: Rounds that are already finished.
    """
    from partita.experiment.run_folder import saved_rounds
    from partita.experiment.runner import describe_compute
    from partita.report import read_metric

    metric, known = None, set[str]()
    with progress() as bar:
        label = printable(settings.label)
        task = bar.add_task(label, total=settings.rounds, completed=done)
        try:
            for row in rows:
                if metric is None:
                    metric = read_metric(folder)
                    for line in _privacy_notes(settings, folder):
                        bar.console.print(line, style="yellow", markup=False, soft_wrap=True)
                    if bar.console.is_terminal:  # not in log files: the run folder records it already
                        bar.console.print(describe_compute(settings, folder), style="dim", markup=False, soft_wrap=True)
                tested = f" · {metric.name} {metric.show(row['test'].get(metric.name))}" if row["test"] else ""
                spent = (row.get("privacy") or {}).get("epsilon")
                cost = "" if spent is None else f" · ε {spent:.3g}"
                bar.update(task, completed=row["round"] + 1, description=label + tested + cost)
                for client, reason in row["lost"].items():
                    lost = printable(f"round {row['round']}: lost {client}: {reason}")
                    bar.console.print(lost, style="yellow", markup=False)
                raised = row.get("alarms", {})
                for kind in sorted(raised.keys() - known):  # print an alarm once while it persists
                    alarm = f"round {row['round']}: {kind}: {raised[kind]}"
                    bar.console.print(alarm, style="yellow", markup=False, soft_wrap=True)
                # An alarm on the test persists over the rounds without one.
                known = set(raised) | (set() if row["test"] else known & {"one predicted class"})
        except BaseException as error:
            if kept := saved_rounds(folder):
                error.add_note(f"{kept} rounds are saved in {folder}; continue with: partita resume {folder}")
            raise


def _privacy_notes(settings: Config, folder: Path) -> Iterator[str]:
    """Yield notes on the noise of a private run for its owner."""
    from partita.privacy.secret import FILE

    if settings.privacy and settings.privacy.repeatable:
        yield "privacy.repeatable is set: anyone can recompute the noise from the seed, so epsilon is a simulation"
    elif (folder / FILE).exists():
        yield f"the noise depends on this run's secret, {folder / FILE}: keep it private; resuming the run needs it"


def progress() -> Progress:
    """Create the progress bar. It is disabled when stderr is not a terminal."""
    console = Console(stderr=True)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        RateColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class RateColumn(ProgressColumn):
    """Rounds per second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.2f}/s" if task.speed else "–/s", style="progress.data.speed")
