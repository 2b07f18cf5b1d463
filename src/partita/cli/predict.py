"""`partita predict`: what a trained model predicts for the rows of a file."""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from partita.cli.evaluate import to_strict
from partita.cli.options import TrustCode
from partita.cli.round_choice import parse_round


def predict(
    folder: Annotated[Path, typer.Argument(help="Run folder, or folder that 'partita export' wrote.")],
    file: Annotated[Path, typer.Argument(help="csv, json, jsonl, parquet or txt file, an image, or a folder of them.")],
    form: Annotated[Literal["jsonl", "csv"], typer.Option("--format", help="Format of the output.")] = "jsonl",
    columns: Annotated[str | None, typer.Option(help="Comma-separated columns of the input to write too.")] = None,
    round: Annotated[str, typer.Option(help="Checkpoint of a run: best, last, or a number of rounds.")] = "last",
    client: Annotated[str | None, typer.Option(help="Predict with this client's own model.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=10**6, help="Rows in a forward pass.")] = 32,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of a generated text.")] = 64,
    out: Annotated[Path | None, typer.Option(help="Segmentation: folder for the masks.")] = None,
    base: Annotated[
        str | None, typer.Option(help="Folder or Hub id of the model under an exported adapter or prompts.")
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="For exported folders.")] = "auto",
    trust_code: TrustCode = False,
) -> None:
    """Predict for each row of a file, without labels, and print JSON lines or CSV. Rows are read as a stream.

    For a run folder, this reads the data, the model and all other files named in the run's config.toml.
    """
    from partita.data.row_stream import check_file
    from partita.experiment import run_folder

    run_folder.require_model(folder)
    check_file(file)
    from partita.experiment.gc_freeze import importing

    with importing():
        from partita.experiment.predict import Cut, Options, predict_file

    chosen = tuple(name.strip() for name in columns.split(",")) if columns else ()
    options = Options(
        parse_round(round), client, batch_size, chosen, out, max_new_tokens, base, device, trust_code
    )  # fmt: skip
    cut = Cut()
    rows = _counted(predict_file(folder, file, options, cut))
    if form == "csv":
        _write_csv(rows)
    else:
        for row in rows:
            print(json.dumps(to_strict(row), ensure_ascii=False))
    if cut.texts:
        print(
            f"note: {cut.texts:,} texts are longer than the model's limit, and their end is not read", file=sys.stderr
        )


def _counted(rows: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Say on stderr how far it is, if someone is looking."""
    shown, count, last = sys.stderr.isatty(), 0, time.monotonic()
    for row in rows:
        count += 1
        if shown and time.monotonic() - last > 1:
            last = time.monotonic()
            print(f"\r{count:,} rows", end="", file=sys.stderr, flush=True)
        yield row
    if shown:
        print(f"\r{count:,} rows", file=sys.stderr)


def _write_csv(rows: Iterable[dict[str, Any]]) -> None:
    writer = None
    for row in rows:
        flat = _flat(row)
        if writer is None:
            writer = csv.DictWriter(sys.stdout, list(flat), lineterminator="\n")
            writer.writeheader()
        writer.writerow(flat)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with one cell for each number of a mapping. Lists are written as JSON."""
    cells: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            cells |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            cells[name] = json.dumps(to_strict(value), ensure_ascii=False) if isinstance(value, list) else value
    return cells
