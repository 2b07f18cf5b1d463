"""The report as one self-contained HTML file with inline styles and figures."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from itertools import groupby, pairwise
from pathlib import Path

from partita.report import score_details, sections
from partita.report.comparison import Comparison
from partita.report.html_elements import (
    breakable,
    escape,
    html_list,
    html_table,
    line_sample,
    preformatted,
    value_with_spread,
)
from partita.report.load import CODE, RunRecord, by_label, clients, metric_of, settings
from partita.report.plot_style import Style, styles
from partita.report.render import Column, by_question
from partita.report.tables import compare
from partita.storage.safe_text import label_folder


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
    out = Path(out)
    parts = (
        _header(records, title),
        _comparison(records, compare(records, target, metric)),
        score_details.details_section(records),
        sections.samples_section(records),
        sections.split_section(records),
        sections.figures_section(records, metric_of(records, metric).name),
        sections.layers_section(records),
        sections.alarms_section(records),
        sections.privacy_section(records),
        sections.lost_clients_section(records),
        sections.plan_section(records),
        _settings(records),
        _reproduce(records),
    )
    css = (files("partita.report") / "page.css").read_text(encoding="utf-8")
    text = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{css}</style>\n</head>\n<body>\n<main>\n{''.join(parts)}</main>\n</body>\n</html>\n"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    # Write to a temporary file and rename it, so that readers never see a partial page.
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


def _header(records: Sequence[RunRecord], title: str) -> str:
    labels = list(by_label(records))
    seeds = sorted({record.seed for record in records})
    finished = sum(record.finished for record in records)
    facts = {
        "data": _names(records, "data"),
        "model": _names(records, "model"),
        "clients per round": _range(clients(row) for record in records for row in record.rows),
        "rounds": _range(len(record.rows) for record in records),
        "seeds": ", ".join(map(str, seeds)),
        "runs": f"{len(records)}" if finished == len(records) else f"{len(records)} ({finished} finished)",
        "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }
    what = f"{', '.join(labels[:-1])} and {labels[-1]}" if len(labels) > 1 else labels[0]
    many = f"{len(seeds)} seeds" if len(seeds) > 1 else "one seed"
    summary = f"{what} on {facts['data']} with {facts['model']}, over {many} and {facts['rounds']} rounds."
    grid = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return (
        f'<header>\n<h1>{escape(title)}</h1>\n<p class="lead">{escape(summary)}</p>\n'
        f'<dl class="facts">{grid}</dl>\n</header>\n'
    )


def _names(records: Sequence[RunRecord], table: str) -> str:
    """Prefer the path of the data or model to the name of its loader."""
    tables = [record.config.get(table) or {} for record in records]
    names = (Path(str(config.get("path") or config.get("name", "unnamed " + table))).name for config in tables)
    return ", ".join(dict.fromkeys(names))


def _range(counts: Iterable[int]) -> str:
    seen = sorted(set(counts))
    return str(seen[0]) if len(seen) == 1 else f"{seen[0]} to {seen[-1]}"


def _comparison(records: Sequence[RunRecord], comparison: Comparison) -> str:
    label_styles = styles(by_label(records))
    tables = "".join(
        f"<h3>{escape(title)}</h3>\n{_comparison_table(shown, label_styles)}"
        for title, shown in by_question(comparison).items()
    )
    return f"<section>\n<h2>Comparison</h2>\n{tables}{html_list(comparison.comments)}</section>\n"


def _comparison_table(shown: Sequence[Column], label_styles: Mapping[str, Style]) -> str:
    name, rest = shown[0], shown[1:]
    # A vertical rule at the left of each group's first column separates the groups.
    edges = [
        ' class="starts"' if column.group and column.group != before.group else "" for before, column in pairwise(shown)
    ]
    groups = "".join(
        f'<th colspan="{len(list(members))}">{escape(group)}</th>'
        for group, members in groupby(shown, lambda column: column.group)
    )
    headings = "".join(f"<th{edge}>{escape(column.heading)}</th>" for edge, column in zip(edges, rest, strict=True))
    body = []
    for row, label in enumerate(name.cells):
        cells = "".join(
            f"<td{edge}>{value_with_spread(column.cells[row])}</td>" for edge, column in zip(edges, rest, strict=True)
        )
        body.append(
            f'<tr><th scope="row" class="name">{line_sample(label_styles[label])}{breakable(label)}</th>{cells}</tr>\n'
        )
    return (
        f'<div class="wide"><table>\n<thead><tr class="group">{groups}</tr>'
        f'<tr><th class="name">{escape(name.heading)}</th>{headings}</tr></thead>\n'
        f"<tbody>\n{''.join(body)}</tbody></table></div>\n"
    )


def _settings(records: Sequence[RunRecord]) -> str:
    groups = by_label(records)
    flat = {label: settings(runs[0]) for label, runs in groups.items()}
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    differing = [key for key in keys if len({values.get(key) for values in flat.values()}) > 1]
    parts = ["<section>\n<h2>Settings</h2>\n"]
    if differing:
        body = [(key, *(values.get(key, "–") for values in flat.values())) for key in differing]
        parts.append("<p>Settings that differ between the labels, for the first seed of each.</p>\n")
        parts.append(html_table(("setting", *flat), body))
    for label, runs in groups.items():
        seeds = ", ".join(str(run.seed) for run in runs)
        many = "seeds" if len(runs) > 1 else "seed"
        parts.append(
            f"<details><summary>{escape(label)} <span>{many} {escape(seeds)}</span></summary>\n"
            f"{preformatted(runs[0].config_text)}{_own_code(runs[0])}</details>\n"
        )
    return "".join([*parts, "</section>\n"])


def _own_code(record: RunRecord) -> str:
    return "".join(f"<h3>{escape(name)}</h3>\n{preformatted(text)}" for name, text in record.code.items())


def _reproduce(records: Sequence[RunRecord]) -> str:
    keys = dict.fromkeys(key for record in records for key in record.environment)
    body = [
        (key, "; ".join(dict.fromkeys(record.environment[key] for record in records if key in record.environment)))
        for key in keys
    ]
    table = html_table(("what", "value"), body) if body else "<p>No environment was recorded.</p>\n"
    return (
        "<section>\n<h2>Reproduce</h2>\n<p>These commands write the configs and repeat all runs, in any folder. Paths "
        f"in a config are relative to that folder.</p>\n{preformatted(commands(records))}\n"
        f"{html_list(_not_repeated(records))}<h3>Environment</h3>\n{table}</section>\n"
    )


def commands(records: Sequence[RunRecord]) -> str:
    """Return shell commands that write the configs and repeat the runs, each in a new folder.

    Runs of a label that differ only in the seed share a config file.
    """
    lines, folders = ["mkdir -p again"], set[str]()
    for label, runs in by_label(records).items():
        folder = label_folder(label)
        while folder in folders:  # different labels can have the same folder
            folder += "_"
        folders.add(folder)
        written: list[RunRecord] = []
        for run in runs:
            path = _config_path(folder, run, f"-{run.seed}" if written else "")
            if not written or settings(run) != settings(written[0]):
                lines += _write_config(path, run)
                written.append(run)
            else:
                path = _config_path(folder, run)
            out = f"again/{folder}/seed-{run.seed}"
            lines.append(f"partita run --config {shlex.quote(path)} --set seed={run.seed} --out {shlex.quote(out)}")
    return "\n".join(lines)


def _config_path(folder: str, run: RunRecord, number: str = "") -> str:
    """Return where to write a config. The user's own files lie next to it, so it then has a folder of its own."""
    return f"again/{folder}{number}-config/config.toml" if run.code else f"again/{folder}{number}.toml"


def _write_config(path: str, run: RunRecord) -> list[str]:
    if not run.code:
        return _write_file(path, run.config_text)
    parent = path.rpartition("/")[0]
    lines = [f"mkdir -p {shlex.quote(f'{parent}/{CODE}')}", *_write_file(path, run.config_text)]
    for name, text in run.code.items():
        lines += _write_file(f"{parent}/{name}", text)
    return lines


def _write_file(path: str, text: str) -> list[str]:
    """Return the shell's lines that write a file. No line of the text may end it, because the text is untrusted."""
    end = "END"
    while end in text:
        end += "_"
    return [f"cat > {shlex.quote(path)} <<'{end}'", *text.rstrip("\n").split("\n"), end]


def _not_repeated(records: Sequence[RunRecord]) -> list[str]:
    return [
        f"{label}: a repeated run draws new noise from a secret of its own, so its results differ."
        for label, runs in by_label(records).items()
        if runs[0].privacy and not runs[0].privacy.get("repeatable")
    ]
