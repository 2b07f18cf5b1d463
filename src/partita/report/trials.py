"""The trials of `partita tune`: who was given what, and what was chosen."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from partita.record import forms
from partita.record.check import Check, ShapeError
from partita.record.file_names import CHOSEN, TRIAL, TRIALS, TUNING
from partita.record.metric import ACCURACY, MISSING, Metric, short
from partita.report.elements import Table
from partita.report.load import ReportError, RunRecord, number
from partita.report.render import Column, markdown_table, text_table
from partita.storage import atomic_files
from partita.storage.safe_text import printable

MAX_TRIALS = 10_000  # of one method
COUNTED = (
    "Every method was given the same number of trials. A trial that failed or was stopped counts as one; trial 0 is "
    "the config as it is. Stopped trials cost fewer rounds, so the methods may differ in rounds."
)
SCORED = "Scores are on the clients' validation parts after the last round. No trial was scored on a test set."
NOT_COVERED = (
    "Privacy: every trial uses the private data, and the choice among them too, so the ε of a compared run is not the "
    "whole cost. Exact scores on validation examples have no guarantee at all."
)
SPENT = "Privacy: all trials together have spent ε {epsilon} at δ {delta}, by adding up; the compared runs come on top."


@dataclass(frozen=True)
class TrialRecord:
    """One trial. See `experiment.tuning.Trial` for most fields."""

    number: int
    settings: Mapping[str, str]
    state: str
    score: float | None
    rounds: int
    reason: str
    epsilon: float | None
    delta: float | None
    chosen: bool


@dataclass(frozen=True)
class MethodTrials:
    """All trials of one method."""

    method: str
    spaces: tuple[str, ...]
    trials: tuple[TrialRecord, ...]


@dataclass(frozen=True)
class Tuning:
    """A recorded tuning."""

    folder: Path
    metric: Metric
    budget: int
    seeds: int
    search: str
    prune: bool
    rounds: int
    first_seed: int
    methods: tuple[MethodTrials, ...]


def load_tuning(folder: Path) -> Tuning:
    """Load a tuning folder. Only its own files are read.

    Raises:
        ReportError: If a file does not have the expected content.
    """
    asked = _read(folder / TUNING, forms.TUNING)
    path = folder / CHOSEN
    listed = _read(path, forms.CHOSEN)["methods"] if os.path.lexists(path) else []
    best = {each["method"]: each["trial"] for each in listed}
    metric, methods = ACCURACY, []
    for each in asked["methods"]:
        name = each["folder"]
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise ReportError(f"'{folder / TUNING}' names the folder '{name}'; restore it as it was written")
        trials = []
        for place in range(MAX_TRIALS):
            file = folder / TRIALS / name / f"{place:03}" / TRIAL
            if not os.path.lexists(file):
                break
            stored = _read(file, forms.TRIAL)
            metric = Metric(**stored.pop("metric"))
            stored |= {key: number(stored[key]) for key in ("score", "epsilon", "delta")}
            trials.append(TrialRecord(**stored, chosen=best.get(each["label"]) == place))
        methods.append(MethodTrials(each["label"], tuple(each["spaces"]), tuple(trials)))
    known = {key: asked[key] for key in ("budget", "seeds", "search", "prune", "rounds", "first_seed")}
    return Tuning(folder, metric, methods=tuple(methods), **known)


def tunings_of(records: Iterable[RunRecord]) -> list[Tuning]:
    """Load the tunings that the runs come from: those whose folder holds the comparison with the runs."""
    folders = dict.fromkeys(Path(os.path.abspath(record.folder)).parents[2:3] for record in records)
    return [load_tuning(folder) for places in folders for folder in places if os.path.lexists(folder / TUNING)]


def trials_data(records: Iterable[RunRecord]) -> Mapping[str, Any] | None:
    """Return the data of the section: one table by method."""
    tunings = tunings_of(records)
    if not tunings:
        return None
    parts = []
    for tuning in tunings:
        shown = [
            Table(title, [each.heading for each in columns], list(zip(*(each.cells for each in columns), strict=True)))
            for title, columns in tables(tuning).items()
        ]
        parts.append({"summary": summary(tuning), "tables": shown, "notes": notes(tuning)})
    return {"parts": parts}


def tables(tuning: Tuning) -> dict[str, list[Column]]:
    """Return the table of each method by its title: one line for each trial."""
    return {_title(method, tuning): _columns(method, tuning.metric) for method in tuning.methods if method.trials}


def _title(method: MethodTrials, tuning: Tuning) -> str:
    rounds = sum(trial.rounds for trial in method.trials)
    return f"{method.method}: {len(method.trials)} of {tuning.budget} trials, {rounds} rounds"


def _columns(method: MethodTrials, metric: Metric) -> list[Column]:
    keys = list(dict.fromkeys(key for trial in method.trials for key in trial.settings))
    private = any(trial.delta is not None for trial in method.trials)

    def column(heading: str, cells: Iterable[str]) -> Column:
        return Column("", heading, tuple(cells))

    return [
        column("trial", (f"{trial.number}{' (chosen)' if trial.chosen else ''}" for trial in method.trials)),
        *(column(key, (trial.settings.get(key, "not set") for trial in method.trials)) for key in keys),
        column(f"validation {metric.title_with_unit}", (metric.text(trial.score) for trial in method.trials)),
        column("rounds", (str(trial.rounds) for trial in method.trials)),
        *([column("ε", (short(trial.epsilon) for trial in method.trials))] if private else []),
        column("state", (trial.state for trial in method.trials)),
    ]


def summary(tuning: Tuning) -> str:
    """Say in a sentence what every method was given."""
    seeds = f"{tuning.seeds} seed{'s' * (tuning.seeds > 1)} from {tuning.first_seed}"
    stopped = "stopped early if worse than the median" if tuning.prune else "never stopped early"
    return (
        f"{len(tuning.methods)} methods with a budget of {tuning.budget} trials each, of up to {tuning.rounds} rounds "
        f"with {seeds}; search by {tuning.search}, {stopped}."
    )


def notes(tuning: Tuning) -> list[str]:
    """Return what a reader must know: how the budget is counted, what failed, and what the choice costs in privacy."""
    found = [COUNTED, SCORED]
    for method in tuning.methods:
        found.append(f"{method.method} may choose {'; '.join(method.spaces)}.")
    for method in tuning.methods:
        found += [
            f"{method.method}, trial {trial.number} failed: {trial.reason}" for trial in method.trials if trial.reason
        ]
    trials = [trial for method in tuning.methods for trial in method.trials if trial.delta is not None]
    if trials:
        epsilons = [trial.epsilon for trial in trials]
        known = [epsilon for epsilon in epsilons if epsilon is not None]
        total = short(sum(known)) if len(known) == len(epsilons) else MISSING
        found.append(NOT_COVERED)
        found.append(SPENT.format(epsilon=total, delta=f"{sum(trial.delta or 0 for trial in trials):.2g}"))
    return found


def to_text(tuning: Tuning) -> str:
    """Render all trials for a terminal."""
    return "\n".join([summary(tuning), *(text_table(*each) for each in tables(tuning).items()), *_points(tuning, "· ")])


def to_markdown(tuning: Tuning) -> str:
    """Render all trials as Markdown, one table for each method."""
    shown = [f"**{title}**\n\n{markdown_table(columns)}" for title, columns in tables(tuning).items()]
    return "\n".join([summary(tuning) + "\n", *shown, *_points(tuning, "- ")])


def _points(tuning: Tuning, mark: str) -> list[str]:
    return [printable(f"{mark}{note}") for note in notes(tuning)]


def to_json(tuning: Tuning) -> dict[str, Any]:
    """Return the tuning as JSON values."""
    return {**asdict(tuning), "folder": str(tuning.folder), "notes": notes(tuning)}


def _read(path: Path, shape: Check) -> dict[str, Any]:
    try:
        found: dict[str, Any] = shape(atomic_files.read_json(path), "it")
    except ShapeError as error:
        raise ReportError(f"'{path}': {error}; restore it as it was written") from error
    return found
