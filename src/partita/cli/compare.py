"""`partita compare`, and the table with which commands that make runs end."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from partita.cli.completion import complete_methods
from partita.cli.options import (
    Changes,
    ConfigFile,
    Json,
    Markdown,
    MetricName,
    Quiet,
    Report,
    Rounds,
    Verbose,
    check_metric,
    verbosity_of,
    with_rounds,
)
from partita.cli.progress import follow_all


def compare(
    config: ConfigFile,
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated methods, e.g. 'fedavg,fedprox(mu=0.1)'. Differences are relative to the first.",
            autocompletion=complete_methods,
        ),
    ],
    seeds: Annotated[int, typer.Option(help="Number of seeds, counting up from the config's seed.")] = 5,
    changes: Changes = None,
    rounds: Rounds = None,
    out: Annotated[Path, typer.Option(help="Folder for all runs. Existing runs are kept and resumed.")] = Path(
        "runs/compare"
    ),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing runs instead.")] = False,
    jobs: Annotated[int | None, typer.Option(help="Runs in parallel. Default: one per CPU.")] = None,
    target: Annotated[
        float | None, typer.Option(help="Target for 'rounds to target': a fraction such as 0.9, or a perplexity.")
    ] = None,
    report: Report = False,
    as_json: Json = False,
    markdown: Markdown = False,
    metric: MetricName = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run several methods with several seeds and compare them in one table."""
    verbosity = verbosity_of(quiet, verbose)
    from partita.experiment.compare import compare_all, expand
    from partita.experiment.config import check_paths

    folders = expand(config, with_rounds(changes, rounds), methods, seeds, out, overwrite)
    for _, settings in folders:
        check_paths(settings)
    check_metric(metric, folders[0][1].evaluate.metrics)
    follow_all(compare_all(folders, jobs or os.cpu_count() or 1, overwrite), folders, verbosity)
    print_comparison(
        [folder for folder, _ in folders],
        out / "report.html" if report else None,
        target,
        as_json,
        markdown,
        metric=metric,
    )


def print_comparison(
    folders: list[Path],
    page: Path | None,
    target: float | None = None,
    as_json: bool = False,
    markdown: bool = False,
    against: str | None = None,
    default_baseline: str | None = None,
    metric: str | None = None,
    figures: Path | None = None,
) -> None:
    """Print the comparison table and optionally write the report and its figures.

    The baseline for differences is the label `against`, which must exist; else `default_baseline` if it exists; else
    the first label.
    """
    from partita import report
    from partita.core.options import OptionError, closest_match

    records = report.load_runs(folders)
    labels = {record.label for record in records}
    if against is not None and against not in labels:
        raise OptionError(f"--against is '{against}', but no run has that label; {closest_match(against, labels)}")
    recorded = {name for record in records for row in record.rows for name in row.get("test") or ()}
    if metric is not None and metric not in recorded:
        raise OptionError(f"--metric is '{metric}', which no run has recorded; {closest_match(metric, recorded)}")
    records.sort(key=lambda record: record.label != (against or default_baseline))
    comparison = report.compare(records, target, metric)
    show = report.to_json if as_json else report.to_markdown if markdown else report.to_text
    print(show(comparison))
    if page:
        written = report.page(records, page, target=target, metric=metric)
        print(f"report: {written}", file=sys.stderr if as_json or markdown else sys.stdout)
    if figures:
        drawn = report.figures(records, figures, metric)
        print(f"figures: {len(drawn)} files in {figures}", file=sys.stderr if as_json or markdown else sys.stdout)
