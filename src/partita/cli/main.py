"""The command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from partita.cli import flower
from partita.cli.progress import follow, progress
from partita.core.safe_text import label_folder, printable

if TYPE_CHECKING:
    from partita.experiment.config import Config

app = typer.Typer(
    help="Federated fine-tuning of Transformers: say which parts train, which travel, and which stay.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(flower.app, name="flower")

ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="The experiment, in TOML.")]
Changes = Annotated[list[str] | None, typer.Option("--set", help="Change a key: --set method.mu=0.1. May be repeated.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the table in Markdown.")]
Report = Annotated[bool, typer.Option("--report", help="Write the HTML report as well.")]


@app.command()
def run(
    config: ConfigFile,
    changes: Changes = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/LABEL-seed-N unless said.")] = None,
    report: Report = False,
) -> None:
    """Run one experiment and record it in a folder."""
    settings = _load(config, changes)
    from partita.experiment.runner import start

    folder = out or Path("runs") / f"{label_folder(settings.label)}-seed-{settings.seed}"
    follow(start(settings, folder), settings, folder, 0)
    _print_comparison([folder], folder / "report.html" if report else None)


@app.command()
def resume(folder: Annotated[Path, typer.Argument(help="The run's folder.")], report: Report = False) -> None:
    """Go on with a run that was stopped, from its newest checkpoint.

    It reads the data, the model and the other files that the run's config.toml names.
    """
    from partita.experiment import run_folder

    if not (folder / run_folder.CONFIG).exists():
        raise run_folder.RunFolderError(
            f"{folder} holds no run (it has no {run_folder.CONFIG}); 'partita ls' lists those there are"
        )
    run_folder.verify(folder)
    if run_folder.finished(folder):
        print(f"{folder} is finished; nothing to resume")
    else:
        settings = _load(folder / run_folder.CONFIG)
        from partita.experiment.runner import resume as go_on

        follow(go_on(settings, folder), settings, folder, run_folder.saved_rounds(folder))
    _print_comparison([folder], folder / "report.html" if report else None)


@app.command()
def plan(
    config: ConfigFile,
    changes: Changes = None,
    round: Annotated[int, typer.Option(help="Counted from 0.")] = 0,
    client: Annotated[
        str | None, typer.Option(help="A client's name; the first of the round's cohort unless said.")
    ] = None,
    by: Annotated[str, typer.Option(help="role, layer or name.")] = "role",
    as_json: Json = False,
) -> None:
    """Show which parameters train, go up, come down and stay, for one client in one round, with the bytes."""
    settings = _load(config, changes)
    from partita.experiment.preview import preview

    shown = preview(settings, round, client, by)
    print(json.dumps(shown.to_json(), indent=1) if as_json else shown.to_text())


@app.command()
def compare(
    config: ConfigFile,
    methods: Annotated[str, typer.Option(help="As in 'fedavg,fedprox(mu=0.1)'; differences are taken to the first.")],
    seeds: Annotated[int, typer.Option(help="Repeats, with seeds from the config's on.")] = 5,
    changes: Changes = None,
    out: Annotated[Path, typer.Option(help="A folder for all runs; those already there are kept.")] = Path(
        "runs/compare"
    ),
    jobs: Annotated[int | None, typer.Option(help="Runs side by side; one a processor unless said.")] = None,
    target: Annotated[
        float | None, typer.Option(help="For 'rounds to target': a share such as 0.9, or a perplexity.")
    ] = None,
    report: Report = False,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Run several methods over several seeds and compare them in one table."""
    from partita.experiment.compare import compare_all, expand

    folders = expand(config, changes or (), methods, seeds, out)
    total = sum(settings.rounds for _, settings in folders)
    with progress() as bar:
        task = bar.add_task(f"{len(folders)} runs", total=total)
        for done in compare_all(folders, jobs or os.cpu_count() or 1):
            bar.update(task, completed=done)
    _print_comparison(
        [folder for folder, _ in folders], out / "report.html" if report else None, target, as_json, markdown
    )


@app.command()
def budget(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="An experiment with a privacy table.")] = None,
    changes: Changes = None,
    epsilon: Annotated[float | None, typer.Option(help="The budget; the noise is found for it.")] = None,
    noise: Annotated[float | None, typer.Option(help="In multiples of the clip, instead of a budget.")] = None,
    delta: Annotated[float | None, typer.Option(help="1e-5, or a tenth of one in the examples, unless said.")] = None,
    examples: Annotated[int | None, typer.Option(help="Training examples of one client, asked in every round.")] = None,
    batch: Annotated[int, typer.Option(help="Examples a step, on average.")] = 32,
    rounds: Annotated[int, typer.Option(help="Rounds in which the client is asked.")] = 20,
    epochs: Annotated[int, typer.Option(help="Passes over the examples a round.")] = 1,
    as_json: Json = False,
) -> None:
    """Show the noise that a privacy budget asks for, how epsilon grows, and what other choices would change."""
    from partita.core.options import OptionError
    from partita.privacy.budget import Client, forecast_client, forecast_run

    if config is None:
        if examples is None:
            raise OptionError("say --config, or --examples and what else is known of one client")
        shown = forecast_client(Client(examples, batch, rounds, epochs), epsilon, noise, delta)
    else:
        asked = {"privacy.epsilon": epsilon, "privacy.noise": noise, "privacy.delta": delta}
        said = [f"{key}={value}" for key, value in asked.items() if value is not None]
        settings = _load(config, [*(changes or ()), *said])
        from partita.experiment.builder import build

        guard = build(settings).guard
        if guard is None:
            raise OptionError(f"{config} has no [privacy] table; add one, or say --epsilon")
        shown = forecast_run(guard)
    print(json.dumps(shown.to_json(), indent=1) if as_json else shown.to_text())


@app.command()
def audit(
    folder: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    canaries: Annotated[
        int, typer.Option(help="Train again with so many examples put in by coin flips: a lower bound on epsilon.")
    ] = 0,
    shadows: Annotated[int, typer.Option(help="With canaries: train so many more times, for likelihood ratios.")] = 0,
    as_json: Json = False,
) -> None:
    """Check a finished run's noise, clip and sampling, and attack it. The exit code is 1 if its claim does not hold.

    It reads the data, the model and the other files that the run's config.toml names.
    """
    from partita.experiment.audit import AUDIT, failures
    from partita.experiment.audit import audit as attack

    found = attack(folder, canaries, shadows)
    failed = failures(found)
    if as_json:
        print(json.dumps(found, indent=1))
        raise typer.Exit(int(bool(failed)))
    for check in found["mechanism"]:
        mark = "yes" if check["passed"] else "NO "
        print(
            f"{mark}  {check['what']}: {check['found']:.4g}, charged {check['charged']:.4g} ({check['numbers']} seen)"
        )
    for name, each in found["attacks"].items():
        print(f"{name}: AUC {each['auc']:.3f}, {each['true_at_1%']:.1%} found at 1% false alarms")
    claim, bound = found["claim"], found["bound"]
    if bound:
        print(f"epsilon is at least {bound['epsilon']:.3g}, by {bound['right']} right of {bound['guesses']} guesses")
    if claim and claim["planned"] is not None:
        print(f"epsilon is claimed to be at most {claim['planned']:.3g}")
    print(f"written to {folder / AUDIT}; 'partita report {folder}' shows it")
    for sentence in failed:
        print(f"the claim of privacy does not hold: {sentence}")
    raise typer.Exit(int(bool(failed)))


@app.command(name="report")
def report_command(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.")],
    out: Annotated[Path | None, typer.Option(help="The page; report.html in the first folder unless said.")] = None,
    target: Annotated[
        float | None, typer.Option(help="For 'rounds to target': a share such as 0.9, or a perplexity.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="The label that differences are taken to; fedavg, or the first, unless said.")
    ] = None,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Write one self-contained HTML page on recorded runs, and print their table."""
    _print_comparison(folders, out or folders[0] / "report.html", target, as_json, markdown, against, "fedavg")


@app.command(name="methods")
def methods_command(
    name: Annotated[str | None, typer.Argument(help="A method, to read its card.")] = None, as_json: Json = False
) -> None:
    """List the methods, or print the card of one."""
    from rich.table import Table

    from partita.methods import COMPOSITIONS
    from partita.methods.cards import card, listing

    if name:
        print(card(name))
        return
    rows = listing()
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table("method", "parameters", "what it does", box=None, header_style="bold")
    for row in rows:
        table.add_row(row["name"], ", ".join(f"{k}={v!r}" for k, v in row["parameters"].items()) or "–", row["about"])
    Console().print(table)
    print(f"\nSupported compositions: {', '.join(COMPOSITIONS)}\nA method's card: partita methods NAME")


@app.command()
def lab(
    what: Annotated[Literal["fig1", "fig2", "all"], typer.Argument(help="Which figures to draw.")] = "all",
    out: Annotated[Path, typer.Option(help="A folder for the figures and, with all, a page.")] = Path("runs/lab"),
    seeds: Annotated[int, typer.Option(help="Federations drawn for each setting.")] = 12,
) -> None:
    """FedFrozen's theory on linear attention, computed and drawn: bias, drift, and the choice of the warm-up."""
    from partita.lab.commands import make

    for path in make(what, out, seeds):
        print(path)


@app.command()
def ls(folder: Annotated[Path, typer.Argument(help="Where to look.")] = Path("runs"), as_json: Json = False) -> None:
    """List the runs below a folder."""
    from rich.table import Table
    from rich.text import Text

    from partita.report import find, load_run
    from partita.report.load import tested

    rows: list[dict[str, Any]] = []
    for path in find(folder):
        each = load_run(path)
        values = [value for _, value in tested(each, each.metric.name)]
        rows.append(
            {
                "folder": str(path),
                "label": each.label,
                "seed": each.seed,
                "rounds": f"{len(each.rows)}/{each.config.get('rounds', '?')}",
                "finished": each.finished,
                "metric": each.metric.name,
                "value": values[-1] if values else None,
                "shown": each.metric.show(values[-1] if values else None),
            }
        )
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table("folder", "label", "seed", "rounds", "test", "", box=None, header_style="bold")
    for row in rows:
        result = f"{row['metric']} {row['shown']}"
        state = "finished" if row["finished"] else f"unfinished: partita resume {row['folder']}"
        cells = row["folder"], row["label"], row["seed"], row["rounds"], result, state
        table.add_row(*(Text(printable(cell)) for cell in cells))  # Text: a label with brackets is no markup
    Console().print(table)


def _load(config: Path, changes: list[str] | None = None) -> Config:
    """The config. With it come torch and the library of its model, which take most of a short run's time."""
    from partita.experiment.gc_freeze import importing

    with importing():
        from partita.experiment.config import load

        return load(config, changes or ())


def _print_comparison(
    folders: list[Path],
    page: Path | None,
    target: float | None = None,
    as_json: bool = False,
    markdown: bool = False,
    against: str | None = None,
    usual: str | None = None,
) -> None:
    """Differences are taken to `against`, which must be there, or to `usual` if it is, or to the first."""
    from partita import report
    from partita.core.options import OptionError, closest_match

    records = [report.load_run(run) for folder in folders for run in report.find(folder)]
    labels = {each.label for each in records}
    if against is not None and against not in labels:
        raise OptionError(f"--against is '{against}', but no run has that label; {closest_match(against, labels)}")
    records.sort(key=lambda each: each.label != (against or usual))
    comparison = report.compare(records, target)
    show = report.to_json if as_json else report.to_markdown if markdown else report.to_text
    print(show(comparison))
    if page:
        written = report.page(records, page, target=target)
        print(f"report: {written}", file=sys.stderr if as_json or markdown else sys.stdout)


def _print_err(*lines: str) -> None:
    """Messages quote names and values of files that others wrote."""
    print(*(printable(line) for each in lines for line in each.split("\n")), sep="\n", file=sys.stderr)


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _show(message: Warning | str, kind: type[Warning], file: str, *more: Any) -> None:
    """Our own warnings in a line, as errors are; others as Python shows them."""
    if Path(__file__).parents[1] in Path(file).parents:
        _print_err(f"warning: {message}")
    else:
        _print_err(warnings.formatwarning(message, kind, file, *more[:1]).rstrip())


def main() -> None:
    """Whatever a user can mend is told in a line; PARTITA_DEBUG=1 adds the traceback."""
    warnings.showwarning = _show  # type: ignore[assignment]
    try:
        app()
    except KeyboardInterrupt as stop:
        _print_err("stopped", *_notes(stop))
        sys.exit(130)
    except Exception as error:
        if os.environ.get("PARTITA_DEBUG") or not _is_user_error(error):
            raise
        _print_err(f"error: {error}", *_notes(error))
        sys.exit(1)


def _is_user_error(error: Exception) -> bool:
    if isinstance(error, ValueError | OSError):
        return True
    from partita.core.client import ClientError

    return isinstance(error, ClientError)
