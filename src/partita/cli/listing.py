"""`partita ls`: the runs below a folder. A run that cannot be read is listed with the reason."""

from __future__ import annotations

import os
import shlex
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from partita.record.file_names import CHECKSUMS, CONFIG, ROWS
from partita.report import ReportError, load_run
from partita.report.load import by_number, read_config, tested
from partita.storage.safe_text import printable

RECORDED = (ROWS, CHECKSUMS)  # a run folder has one of these next to its config


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Describe all runs at or below a folder, in the order of their folders. Numbers in names are sorted by value.

    Raises:
        ReportError: If there is none.
    """
    found = [Path(parent) for parent, _, names in os.walk(folder) if CONFIG in names and {*RECORDED} & {*names}]
    if not found:
        raise ReportError(f"no run at or below '{folder}'; start one with: partita run --config FILE")
    return [_describe(path) for path in sorted(found, key=lambda path: by_number(str(path)))]


def _describe(folder: Path) -> dict[str, Any]:
    changed = max((folder / name).stat().st_mtime for name in (CONFIG, *RECORDED) if (folder / name).exists())
    row: dict[str, Any] = {
        "folder": str(folder),
        "label": None,
        "seed": None,
        "rounds": None,
        "finished": False,
        "stopped": None,
        "metric": None,
        "value": None,
        "shown": "–",
        "changed": datetime.fromtimestamp(changed).astimezone().isoformat(timespec="seconds"),
        "error": None,
    }
    try:
        config, _ = read_config(folder / CONFIG)
        row |= {"label": config["label"], "seed": config["seed"], "rounds": f"0/{config.get('rounds', '?')}"}
        if not (folder / ROWS).exists():  # the run is in its first round, or was stopped in it
            return row
        record = load_run(folder)
    except (ValueError, OSError) as error:
        return {**row, "rounds": None, "error": str(error)}
    values = [value for _, value in tested(record, record.metric.name)]
    return {
        **row,
        "rounds": f"{len(record.rows)}/{record.config.get('rounds', '?')}",
        "finished": record.finished,
        "stopped": record.stopped or None,
        "metric": record.metric.name,
        "value": values[-1] if values else None,
        "shown": record.metric.show(values[-1] if values else None),
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the list as a table for a terminal."""
    shown = Table("folder", "label", "seed", "rounds", "test", "last change", "", box=None, header_style="bold")
    for row in rows:
        known = [str(row[key]) if row[key] is not None else "–" for key in ("folder", "label", "seed", "rounds")]
        result = f"{row['metric']} {row['shown']}" if row["metric"] else "–"
        cells = [*known, result, row["changed"][:16].replace("T", " "), _state(row)]
        shown.add_row(*(Text(printable(cell)) for cell in cells))  # Text: brackets in a label are not markup
    return shown


def _state(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"cannot be read: {row['error']}"
    if row["stopped"]:
        return str(row["stopped"])
    return "finished" if row["finished"] else f"unfinished: partita resume {shlex.quote(row['folder'])}"
