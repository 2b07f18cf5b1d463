"""The command-line interface. Commands import heavy modules only when they run."""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from partita.cli import describe, flower, site_doctor, sites
from partita.cli import site as site_command
from partita.cli.budget import budget
from partita.cli.check import check
from partita.cli.compare import compare, print_comparison
from partita.cli.completion import complete_method
from partita.cli.config import config
from partita.cli.configs import data, init, options
from partita.cli.evaluate import evaluate
from partita.cli.export import export
from partita.cli.lazy_imports import import_lazily, lighten_transformers
from partita.cli.model import model
from partita.cli.new import new
from partita.cli.options import (
    Changes,
    ConfigFile,
    Json,
    Markdown,
    MetricName,
    Quiet,
    Report,
    Rounds,
    TrustCode,
    Verbose,
    check_metric,
    load_config,
    load_recorded_config,
    verbosity_of,
    with_rounds,
)
from partita.cli.predict import predict
from partita.cli.progress import follow
from partita.cli.split import split
from partita.cli.stopping import Stopped, stop_on_signals
from partita.cli.tune import tune
from partita.cli.watch import watch
from partita.record import file_names
from partita.storage.safe_text import printable

app = typer.Typer(
    help="Federated fine-tuning of Transformers: say which parts train, which travel, and which stay.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(flower.app, name="flower")
site_doctor.register(site_command.app)
describe.register_site(site_command.app)
describe.register_sites(sites.app)
app.add_typer(site_command.app, name="site")
app.add_typer(sites.app, name="sites")
for each in (init, data, options, budget, check, config, model, evaluate, export, new, predict, watch, split, tune):
    app.command()(each)


def _print_version(asked: bool) -> None:
    if asked:
        import partita

        print(f"partita {partita.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    config: ConfigFile,
    changes: Changes = None,
    rounds: Rounds = None,
    out: Annotated[Path | None, typer.Option(help="Run folder. Default: runs/LABEL-seed-N.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="If the folder holds this very run, continue it instead of failing.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the run in the folder first.")] = False,
    report: Report = False,
    as_json: Json = False,
    metric: MetricName = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run one experiment and record it in a run folder."""
    verbosity = verbosity_of(quiet, verbose)
    if resume and overwrite:
        raise ValueError("--resume continues a run and --overwrite deletes it; choose one")
    settings = load_config(config, with_rounds(changes, rounds))
    check_metric(metric, settings.evaluate.metrics)
    from partita.experiment import run_folder
    from partita.experiment.run_names import default_folder
    from partita.experiment.runner import start, start_or_resume

    folder = out or default_folder(settings.label, settings.seed)
    if resume and (result := run_folder.finished(folder)) and result.get("rounds") == settings.rounds:
        told = f"{folder} {run_folder.stopped(folder) or 'is finished'}; nothing to resume"
        print(printable(told), file=sys.stderr if as_json else sys.stdout)
    done = run_folder.saved_rounds(folder) if resume and (folder / file_names.CONFIG).exists() else None
    follow(
        lambda on_reply: (
            start_or_resume(settings, folder, on_reply) if resume else start(settings, folder, overwrite, on_reply)
        ),
        settings,
        folder,
        done,
        verbosity,
    )
    print_comparison([folder], folder / "report.html" if report else None, as_json=as_json, metric=metric)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="Run folder.")],
    rounds: Annotated[
        int | None,
        typer.Option(min=1, max=10**6, help="Extend the run to this many rounds in total, also if it is finished."),
    ] = None,
    report: Report = False,
    trust_code: TrustCode = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Resume a stopped run from its newest checkpoint, or extend a run to more rounds.

    The result is that of a run with all rounds from the start. An extension that cannot be exact is refused.

    This reads the data, the model and all other files named in the run's config.toml.
    """
    verbosity = verbosity_of(quiet, verbose)
    from partita.experiment import run_folder

    run_folder.require_run(folder)
    run_folder.complete_extension(folder)
    run_folder.verify(folder)
    if run_folder.finished(folder) and rounds is None:
        print(f"{folder} {run_folder.stopped(folder) or 'is finished'}; nothing to resume")
    else:
        settings = load_recorded_config(folder, trust_code)
        from partita.experiment.runner import resume as resume_run

        total = replace(settings, rounds=rounds or settings.rounds)
        done = run_folder.saved_rounds(folder)
        follow(lambda on_reply: resume_run(settings, folder, rounds, on_reply), total, folder, done, verbosity)
    print_comparison([folder], folder / "report.html" if report else None)


@app.command()
def plan(
    config: ConfigFile,
    changes: Changes = None,
    round: Annotated[int, typer.Option(help="Round number, starting at 0.")] = 0,
    client: Annotated[
        str | None, typer.Option(help="Client name. Default: the first client of the round's cohort.")
    ] = None,
    by: Annotated[str, typer.Option(help="Group parameters by role, layer or name.")] = "role",
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Show which parameters one client trains, uploads, downloads and keeps in one round, with byte counts."""
    settings = load_config(config, changes, trust_code)
    from partita.experiment.preview import preview

    shown = preview(settings, round, client, by)
    print(json.dumps(shown.to_json(), indent=1) if as_json else shown.to_text())


app.command()(compare)


@app.command()
def audit(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    canaries: Annotated[
        int,
        typer.Option(
            help="Retrain with this many canary examples, each included by a coin flip. Gives a lower bound on epsilon."
        ),
    ] = 0,
    shadows: Annotated[
        int, typer.Option(help="Train this many shadow runs for likelihood ratios (LiRA). Needs --canaries.")
    ] = 0,
    group: Annotated[
        str | None,
        typer.Option(
            help="Column of the data, such as patient_id. Canaries are then whole groups, also for a run that protects "
            "single examples. Needs --canaries."
        ),
    ] = None,
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Attack a finished run. Exits with 1 if what the attacks prove contradicts the privacy claim.

    This reads the data, the model and all other files named in the run's config.toml.
    """
    from partita.experiment import run_folder

    run_folder.require_run(folder)
    from partita.experiment.audit import audit as attack
    from partita.experiment.audit import failures

    findings = attack(folder, canaries, shadows, trust_code, group)
    failed = failures(findings)
    if as_json:
        print(json.dumps(findings, indent=1))
        raise typer.Exit(int(bool(failed)))
    for name, result in findings["attacks"].items():
        print(f"{name}: AUC {result['auc']:.3f}, {result['true_at_1%']:.1%} true positives at 1% false positives")
    claim, bound = findings["claim"], findings["bound"]
    if bound:
        print(f"epsilon is at least {bound['epsilon']:.3g}: {bound['right']} of {bound['guesses']} guesses were right")
    if claim and claim["planned"] is not None:
        print(f"epsilon is claimed to be at most {claim['planned']:.3g}")
    if claim and group is not None and claim.get("group") != group:
        print(f"canaries were groups by '{group}', about which the run claims nothing")
    print(f"written to {folder / file_names.AUDIT}; 'partita report {folder}' shows it")
    for sentence in failed:
        print(f"the privacy claim does not hold: {sentence}")
    raise typer.Exit(int(bool(failed)))


@app.command(name="report")
def report_command(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders that contain run folders.")],
    out: Annotated[Path | None, typer.Option(help="Output file. Default: report.html in the first folder.")] = None,
    target: Annotated[
        float | None, typer.Option(help="Target for 'rounds to target': a fraction such as 0.9, or a perplexity.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Label of the baseline for differences. Default: fedavg, else the first label.")
    ] = None,
    metric: MetricName = None,
    figures: Annotated[
        Path | None, typer.Option(help="Also write each figure as SVG and PDF, for papers, to this folder.")
    ] = None,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Write a self-contained, interactive HTML report on recorded runs and print their comparison table."""
    if figures and find_spec("matplotlib") is None:
        raise ValueError("--figures needs matplotlib; install it with: pip install 'partita[report]'")
    page = out or folders[0] / "report.html"
    print_comparison(folders, page, target, as_json, markdown, against, "fedavg", metric, figures)


@app.command(name="methods")
def methods_command(
    name: Annotated[
        str | None, typer.Argument(help="Print this method's card.", autocompletion=complete_method)
    ] = None,
    as_json: Json = False,
) -> None:
    """List the methods, or print one method's card."""
    from rich.table import Table

    from partita.methods import COMPOSITIONS
    from partita.methods.cards import card, describe, listing

    if name:
        print(json.dumps(describe(name), indent=1) if as_json else card(name))
        return
    rows = listing()
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    added = any(row["source"] != "partita" for row in rows)  # by installed packages
    headings = ("method", "parameters", "what it does", *(["from"] if added else []))
    table = Table(*headings, box=None, header_style="bold")
    for row in rows:
        options = ", ".join(f"{k}={v!r}" for k, v in row["parameters"].items()) or "–"
        table.add_row(row["name"], options, row["about"], *([row["source"]] if added else []))
    Console().print(table)
    print(f"\nSupported compositions: {', '.join(COMPOSITIONS)}\nShow a method's card: partita methods NAME")


@app.command()
def ls(folder: Annotated[Path, typer.Argument(help="Folder to search.")] = Path("runs"), as_json: Json = False) -> None:
    """List all runs under a folder: how far they are, their last result and when they last changed."""
    from partita.cli.listing import list_runs, table

    rows = list_runs(folder)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        # When the output is not a terminal, rich would wrap it at 80 characters.
        Console(width=None if sys.stdout.isatty() else 10_000).print(table(rows))


def _print_err(*lines: str) -> None:
    """Print to stderr, escaped: messages quote names and values from untrusted files."""
    print(*(printable(line) for text in lines for line in text.split("\n")), sep="\n", file=sys.stderr)


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _show_warning(message: Warning | str, kind: type[Warning], file: str, *more: Any) -> None:
    """Show partita's own warnings on one line, like errors, and all others in Python's format."""
    if Path(__file__).parents[1] in Path(file).parents:
        _print_err(f"warning: {message}")
    else:
        _print_err(warnings.formatwarning(message, kind, file, *more[:1]).rstrip())


def command() -> None:
    """Run the CLI as a process of its own, in which large libraries are imported late."""
    import_lazily("torch")
    lighten_transformers()
    main()


def main() -> None:
    """Run the CLI. Errors that the user can fix print one line; PARTITA_DEBUG=1 shows the traceback."""
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    try:
        with stop_on_signals():
            app()
    except Stopped as stop:
        _print_err("stopped", *_notes(stop))
        sys.exit(stop.exit_code)
    except Exception as error:
        told = _told(error)
        if os.environ.get("PARTITA_DEBUG") or told is None:
            raise
        _print_err(f"error: {told}", *_notes(error))
        sys.exit(1)


def _told(error: Exception) -> str | None:
    """Return what to tell the user of an error; None if it is a fault of partita."""
    kind = type(error).__name__
    if kind == "OutOfMemoryError":
        from partita.engines.first_step import SMALLER, out_of_memory

        return f"{out_of_memory(error)}; {SMALLER}"  # type: ignore[arg-type]
    if kind == "AcceleratorError":
        return (
            f"the GPU failed: {str(error).splitlines()[0]}; 'partita resume' continues a run from its last checkpoint"
        )
    if kind == "RuntimeError":
        from partita.engines.determinism import refusal

        return refusal(error) or None
    return str(error) if _is_user_error(error) else None


def _is_user_error(error: Exception) -> bool:
    if isinstance(error, ValueError | OSError):
        return True
    from partita.core.client import ClientError

    return isinstance(error, ClientError)
