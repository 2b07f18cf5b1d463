"""The report as one HTML file, with its styles, script and data inside.

To add a section:

1. Write a function that takes the `Report` and returns the section's data as a mapping, or None if there is nothing
   to show. Tables, charts and pictures are `elements.Table`, `Chart` (made by `charts.chart`) and `HeatMap`. Name the
   charts once more in a list under the key "charts", so that their values reach the page's script.
2. Write `templates/NAME.html.j2`. It sees the mapping as `data`, and prints elements with the macros of
   `templates/elements.html.j2`: `{{ elements.table(data.table) }}`, `{{ elements.notes(data.notes) }}`,
   `{{ elements.chart(data.charts[0]) }}`. The page prints the heading `<h2>`; the template starts with `<h3>`.
   Text needs no escaping. `style="…"` does nothing, by the page's Content-Security-Policy: use a class of `page.css`.
3. Add a line to `SECTIONS` below, where it belongs on the page.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from partita.record.metric import Metric
from partita.report import client_pages, confusion, reproduce, score_details, sections, settings_compared, trials
from partita.report.comparison import Comparison
from partita.report.elements import Table
from partita.report.findings import findings
from partita.report.load import RunRecord, by_label, clients, metric_of
from partita.report.plot_style import Style, styles
from partita.report.render import Column, by_question
from partita.report.tables import compare
from partita.report.templating import render

LABELS_NAMED = 8  # more labels are only counted in the first sentence


@dataclass(frozen=True)
class Report:
    """What a section is made from."""

    records: Sequence[RunRecord]  # of the first label first: the others are compared with it
    comparison: Comparison
    metric: Metric


@dataclass(frozen=True)
class Section:
    """A section of the page: what its template prints."""

    name: str  # of the template, and id of the element
    title: str
    data: Mapping[str, Any]


def _comparison(report: Report) -> Mapping[str, Any]:
    tables = [_comparison_table(title, shown) for title, shown in by_question(report.comparison).items()]
    return {"tables": tables, "notes": report.comparison.comments}


def _comparison_table(title: str, shown: Sequence[Column]) -> Table:
    return Table(
        title,
        [column.heading for column in shown],
        list(zip(*(column.cells for column in shown), strict=True)),
        kind="numbers",
        groups=[column.group for column in shown],
        labels=True,
    )


# Template, title and data of each section, in the order of the page. A section without data is left out.
SECTIONS: tuple[tuple[str, str, Callable[[Report], Mapping[str, Any] | None]], ...] = (
    ("findings", "Findings", lambda report: {"sentences": findings(report.records, report.comparison)}),
    ("comparison", "Comparison", _comparison),
    ("figures", "Figures", lambda report: sections.figures_data(report.records, report.metric)),
    ("compared", "What differed", lambda report: settings_compared.compared_data(report.records)),
    ("trials", "Trials of the tuning", lambda report: trials.trials_data(report.records)),
    ("details", "Scores in detail", lambda report: score_details.details_data(report.records)),
    ("confusion", "Confusion by class", lambda report: confusion.confusion_data(report.records)),
    ("samples", "Samples", lambda report: sections.samples_data(report.records)),
    ("split", "Data", lambda report: sections.split_data(report.records)),
    ("clients", "Clients", lambda report: client_pages.clients_data(report.records, report.metric)),
    ("layers", "Choice of layers", lambda report: sections.layers_data(report.records)),
    ("alarms", "Alarms", lambda report: sections.alarms_data(report.records)),
    ("privacy", "Privacy", lambda report: sections.privacy_data(report.records)),
    ("lost", "Lost clients", lambda report: sections.lost_clients_data(report.records)),
    ("plan", "Plan", lambda report: sections.plan_data(report.records)),
    ("settings", "Settings", lambda report: reproduce.settings_data(report.records)),
    ("reproduce", "Reproduce", lambda report: reproduce.reproduce_data(report.records)),
)


def page(
    records: Sequence[RunRecord],
    out: Path | str,
    title: str = "Federated fine-tuning, compared",
    target: float | None = None,
    metric: str | None = None,
) -> Path:
    """Write the HTML report of runs.

    Args:
        records: The runs. The other labels are compared with the first.
        out: Path of the HTML file.
        title: Title of the page.
        target: Target of the column "rounds to". Default: as in `compare`.
        metric: Metric to report. Default: the runs' own.
    """
    return _write(Path(out), document(records, title, target, metric))


def document(records: Sequence[RunRecord], title: str, target: float | None = None, metric: str | None = None) -> str:
    """Return the HTML report of runs. The arguments are those of `page`."""
    report = Report(records, compare(records, target, metric), metric_of(records, metric))
    found = [(name, title, data) for name, title, make in SECTIONS if (data := make(report)) is not None]
    label_styles = styles(by_label(records))
    return render(
        "page",
        title=title,
        summary=_summary(records),
        facts=_facts(records),
        sections=[Section(*each) for each in found],
        styles=label_styles,
        script_data=_script_data(label_styles, [data for _, _, data in found]),
    )


def _script_data(label_styles: Mapping[str, Style], found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the data for the page's script: the labels with their styles, the charts by name, and sections' own."""
    labels = [
        {"name": label, "color": style.color, "dash": [] if style.dash == "solid" else style.dash[1]}
        for label, style in label_styles.items()
    ]
    return {
        "labels": labels,
        "charts": {chart.name: chart.content for data in found for chart in data.get("charts", ())},
        **{name: values for data in found for name, values in data.get("script", {}).items()},
    }


def _write(out: Path, text: str) -> Path:
    """Write the file, or leave the old one as it is. Readers never see a partial page."""
    out.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=out.parent, suffix=".html")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(draft, 0o644)
        os.replace(draft, out)
    except BaseException:
        os.unlink(draft)
        raise
    return out


def _facts(records: Sequence[RunRecord]) -> dict[str, str]:
    """Return the facts below the title."""
    finished = sum(record.finished for record in records)
    return {
        "data": _names(records, "data"),
        "model": _names(records, "model"),
        "clients per round": _range(clients(row) for record in records for row in record.rows),
        "rounds": _range(len(record.rows) for record in records),
        "seeds": ", ".join(map(str, sorted({record.seed for record in records}))),
        "runs": f"{len(records)}" if finished == len(records) else f"{len(records)} ({finished} finished)",
        "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }


def _summary(records: Sequence[RunRecord]) -> str:
    labels, seeds, facts = list(by_label(records)), {record.seed for record in records}, _facts(records)
    if len(labels) > LABELS_NAMED:
        what = f"{len(labels)} settings, from {labels[0]} to {labels[-1]},"
    else:
        what = f"{', '.join(labels[:-1])} and {labels[-1]}" if len(labels) > 1 else labels[0]
    many = f"{len(seeds)} seeds" if len(seeds) > 1 else "one seed"
    return f"{what} on {facts['data']} with {facts['model']}, over {many} and {facts['rounds']} rounds."


def _names(records: Sequence[RunRecord], table: str) -> str:
    """Prefer the path of the data or model to the name of its loader."""
    tables = [record.config.get(table) or {} for record in records]
    names = (Path(str(config.get("path") or config.get("name", "unnamed " + table))).name for config in tables)
    return ", ".join(dict.fromkeys(names))


def _range(counts: Iterable[int]) -> str:
    seen = sorted(set(counts))
    return str(seen[0]) if len(seen) == 1 else f"{seen[0]} to {seen[-1]}"
