"""Options that several commands have, and what these do with them.

A command that only looks at a config runs custom code in it only if the user trusts it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from partita.cli.progress import Verbosity
from partita.storage.safe_text import printable

if TYPE_CHECKING:
    from partita.core.own_code import Reference
    from partita.experiment.config import Config

ConfigFile = Annotated[
    Path, typer.Option("--config", "-c", help="Experiment config (TOML), or a Python file that calls fit.")
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="Override a config key, e.g. --set method.mu=0.1. Repeatable.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")]
Report = Annotated[bool, typer.Option("--report", help="Also write the HTML report.")]
Rounds = Annotated[int | None, typer.Option(help="Number of rounds; short for --set rounds=N.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings, errors and the final table.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print every round, with bytes and drift, and how it is computed.")
]
MetricName = Annotated[
    str | None, typer.Option("--metric", help="Recorded metric to compare. Default: the task's own.")
]
TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="Run custom code that you have not run or trusted on this machine.")
]


def look(path: Path, changes: Iterable[str] | None, trust_code: bool) -> Config:
    """Load a config. Ask about custom code on a terminal, and elsewhere refuse it, before anything of it runs.

    Args:
        path: The TOML file, or a Python file that calls `fit`.
        changes: Overrides of its keys.
        trust_code: Trust its code, now and from now on.

    Raises:
        CodeError: If it names code that this user does not trust.
    """
    from partita.experiment.config import load

    return load(path, changes or (), lambda references: _allow(references, trust_code))


def _allow(references: Sequence[Reference], trust_code: bool) -> None:
    from partita.core.own_code import CodeError
    from partita.experiment.trusted_code import NEW, REMEDY, described, trust, untrusted

    new = [] if trust_code else untrusted(references)
    told = ", ".join(dict.fromkeys(printable(described(reference)) for reference in new))
    if new and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise CodeError(f"the config runs {told}, {NEW}; {REMEDY}")
    if new and not typer.confirm(f"The config runs {told}, {NEW}. Trust it?", err=True):
        raise CodeError(f"the config runs {told}, which you do not trust")
    trust(references)


def verbosity_of(quiet: bool, verbose: bool) -> Verbosity:
    """Return how much a command prints."""
    if quiet and verbose:
        raise ValueError("--quiet and --verbose exclude each other; choose one")
    return Verbosity.QUIET if quiet else Verbosity.VERBOSE if verbose else Verbosity.NORMAL


def with_rounds(changes: list[str] | None, rounds: int | None) -> list[str]:
    """Return the overrides, with that of `--rounds`."""
    return [*(changes or ()), *([] if rounds is None else [f"rounds={rounds}"])]


def load_config(config: Path, changes: list[str] | None, trust_code: bool | None = None) -> Config:
    """Load the config and check its paths, before a command imports torch. None is for commands that run its code."""
    from partita.experiment.gc_freeze import importing

    with importing():
        from partita.experiment.config import check_paths, load

        settings = load(config, changes or ()) if trust_code is None else look(config, changes, trust_code)
        check_paths(settings)
        return settings


def load_recorded_config(folder: Path, trust_code: bool) -> Config:
    """Load the config of a run folder."""
    from partita.experiment.gc_freeze import importing

    with importing():
        from partita.experiment.config import load_recorded

        return load_recorded(folder, trust_code)


def check_metric(metric: str | None, own: Iterable[str] = ()) -> None:
    """Refuse a metric that neither a task has nor the config adds, before anything runs."""
    from partita.core.options import OptionError, closest_match
    from partita.core.own_code import short_name
    from partita.evaluation import METRICS

    known = {*(each.name for each in METRICS), *map(short_name, own)}
    if metric is not None and metric not in known:
        raise OptionError(f"--metric is '{metric}', which no task has; {closest_match(metric, known)}")
