"""`partita evaluate`: the scores of a trained model, with intervals and by group."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from partita.cli.options import TrustCode
from partita.cli.round_choice import parse_round
from partita.storage.safe_text import printable

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_CLASSES = 12  # larger confusion matrices are in the JSON only


def evaluate(
    folder: Annotated[Path, typer.Argument(help="Run folder, or folder that 'partita export' wrote.")],
    data: Annotated[
        str | None, typer.Option(help="File, folder or Hub id to evaluate on. Default: the run's own test set.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Part of the data. Default: 'test' if there is one, or the only part.")
    ] = None,
    round: Annotated[str, typer.Option(help="Checkpoint of a run: best, last, or a number of rounds.")] = "last",
    client: Annotated[str | None, typer.Option(help="Evaluate this client's own model.")] = None,
    all_clients: Annotated[
        bool,
        typer.Option(
            "--all-clients", help="Evaluate every client's own model, on its own test part or on the given data."
        ),
    ] = False,
    by: Annotated[
        list[str] | None,
        typer.Option(help="Also score each value of this column; 'class' and 'client' need no column. Repeatable."),
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(help="Column of rows that are drawn together for the intervals, such as a patient."),
    ] = None,
    bootstrap: Annotated[int, typer.Option(min=0, max=10**6, help="Resamples for the intervals; 0 for none.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the resamples.")] = 0,
    least: Annotated[int, typer.Option(min=1, help="Mark groups with fewer examples.")] = 10,
    unknown_labels: Annotated[
        Literal["error", "drop"], typer.Option(help="What to do with rows whose label is missing or unknown.")
    ] = "error",
    base: Annotated[
        str | None, typer.Option(help="Folder or Hub id of the model under an exported adapter or prompts.")
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="For exported folders.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and evaluation.html.")] = None,
    trust_code: TrustCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Score a trained model, with bootstrap intervals, by class, client or column, with confusion and calibration.

    For a run folder, this reads the data, the model and all other files named in the run's config.toml.
    """
    from partita.experiment import run_folder

    chosen = parse_round(round)
    _check_out(out)
    run_folder.require_model(folder)
    from partita.experiment.gc_freeze import importing

    with importing():
        from partita.experiment.evaluate import Options, evaluate_folder

    options = Options(
        data=data,
        split=split,
        round=chosen,
        client=client,
        all_clients=all_clients,
        by=tuple(by or ()),
        groups=groups,
        bootstrap=bootstrap,
        seed=seed,
        least=least,
        unknown_labels=unknown_labels,
        base=base,
        device=device,
        trust_code=trust_code,
    )
    result = evaluate_folder(folder, options)
    if as_json:
        print(json.dumps(to_strict(result), indent=1))
    else:
        _show(result)
    for note in result["notes"]:
        print(printable(f"note: {note}"), file=sys.stderr)
    if out is not None:
        from partita.report.evaluation_page import write_page

        out.mkdir(parents=True, exist_ok=True)
        (out / "results.json").write_text(json.dumps(to_strict(result), indent=1) + "\n", encoding="utf-8")
        page = write_page(to_strict(result), out / "evaluation.html")
        print(printable(f"wrote {out / 'results.json'} and {page}"), file=sys.stderr if as_json else sys.stdout)


def _check_out(out: Path | None) -> None:
    from partita.core.options import OptionError

    if out is not None and out.exists() and not out.is_dir():
        raise OptionError(f"--out is {out}, which is a file; name a folder")


def to_strict(value: Any) -> Any:
    """Return the value with None in place of infinite numbers and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: to_strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_strict(item) for item in value]
    return None if isinstance(value, float) and not -float("inf") < value < float("inf") else value


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 10_000)
    model, data, fractions = result["model"], result["data"], set(result["fractions"])
    whose = f" of client {model['client']}" if model["client"] is not None else ""
    where = f"the {data['part']} part of {data['path']}" if data["path"] else data["part"]
    print(printable(f"{model['method']}{whose} after {model['round']} rounds, on {data['rows']:,} rows of {where}"))
    for reason, count in data["left_out"].items():
        print(printable(f"left out: {count:,} rows {reason}"))
    if result.get("scores"):
        _scores(
            console,
            "metric",
            {name: {"scores": {"": score}} for name, score in result["scores"].items()},
            {},
            fractions,
        )
    for column, groups in result["by"].items():
        _scores(console, column, groups, result, fractions)
    if "worst_tenth" in result:
        worst = result["worst_tenth"]
        value = cell({"value": worst["value"]}, worst["metric"] in fractions)
        print(f"worst tenth of the clients ({worst['clients']}): {worst['metric']} {value}")
    if "confusion" in result:
        _confusion(console, result["confusion"])
    if "calibration" in result:
        found = result["calibration"]
        more = f", Brier score {found['brier']:.3f}" if "brier" in found else ""
        print(f"calibration: expected error {found['ece']:.1%}{more}")


def cell(score: dict[str, Any] | None, fraction: bool) -> str:
    """Return a score as text, with its interval if it has one."""
    if score is None or score["value"] is None:
        return "–"

    def one(value: float) -> str:
        return f"{100 * value:.1f}" if fraction else f"{value:.4g}"

    text = one(score["value"]) + ("%" if fraction else "")
    if score.get("low") is None or score.get("high") is None:
        return text
    return f"{text} ({one(score['low'])} to {one(score['high'])})"


def _scores(console: Console, column: str, groups: dict[str, Any], result: dict[str, Any], fractions: set[str]) -> None:
    """Print one row for each group. The table of all scores has one row for each metric instead."""
    from rich.table import Table
    from rich.text import Text

    if not result:
        table = Table(column, "value (95% interval)", box=None, header_style="bold")
        for name, row in groups.items():
            table.add_row(Text(printable(name)), cell(row["scores"][""], name in fractions))
        console.print(table)
        return
    counts = [key for key in ("examples", "entities", "pixels") if any(key in row for row in groups.values())]
    primary = result["primary"]["name"]
    names = list(dict.fromkeys(name for row in groups.values() for name in row["scores"]))
    shown = [primary, *(name for name in names if name != primary)][:4] if primary in names else names[:4]
    table = Table(box=None, header_style="bold")
    for heading in (column, *counts, *shown):
        table.add_column(Text(printable(heading)))
    small = False
    for name, row in groups.items():
        mark = "*" if row.get("small") else ""
        small = small or bool(mark)
        numbers = [f"{row[key]:,}{mark}" if key in row else "–" for key in counts]
        rates = fractions | {"precision", "recall", "f1", "iou", "dice", "auprc", "relaxed_f1"}
        table.add_row(
            Text(printable(name)), *numbers, *(cell(row["scores"].get(score), score in rates) for score in shown)
        )
    console.print(table)
    if small:
        print("* few examples: the score says little")


def _confusion(console: Console, confusion: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    classes = [printable(name) for name in confusion["classes"]]
    if len(classes) > SHOWN_CLASSES:
        print(f"confusion: {len(classes)} classes; --json and --out have the matrix")
        return
    table = Table(box=None, header_style="bold")
    for heading in (f"true \\ predicted ({confusion['unit']})", *classes):
        table.add_column(Text(heading))
    for name, row in zip(classes, confusion["counts"], strict=True):
        table.add_row(Text(name), *(f"{count:,}" if count else "·" for count in row))
    console.print(table)
