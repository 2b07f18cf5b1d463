"""The report as one self-contained HTML file with inline styles and figures."""

from __future__ import annotations

import html
import json
import os
import shlex
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.report import layer_selection, plan_stages, plots, privacy
from partita.report.load import RunRecord, by_label, clients, metric_of, settings
from partita.report.plot_style import Style, styles, svg
from partita.report.render import Column, by_question, size
from partita.report.tables import Comparison, compare
from partita.storage.safe_text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    sections = (
        _head(records, title),
        _comparison(records, compare(records, target, metric)),
        _figures(records, metric_of(records, metric).name),
        _choice(records),
        _alarms(records),
        _privacy(records),
        _lost(records),
        _plans(records),
        _settings(records),
        _origin(records, out.parent),
    )
    css = (files("partita.report") / "page.css").read_text(encoding="utf-8")
    text = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{css}</style>\n</head>\n<body>\n<main>\n{''.join(sections)}</main>\n</body>\n</html>\n"
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


def escape(text: str) -> str:
    """Escape untrusted text such as labels and client names for an HTML element or attribute."""
    return html.escape(printable(text))


def _pre(text: str) -> str:
    return "<pre>" + "\n".join(map(escape, text.split("\n"))) + "</pre>"


def _head(records: Sequence[RunRecord], title: str) -> str:
    labels = list(by_label(records))
    seeds = sorted({record.seed for record in records})
    finished = sum(record.finished for record in records)
    facts = {
        "data": _name(records, "data"),
        "model": _name(records, "model"),
        "clients per round": _range(clients(row) for record in records for row in record.rows),
        "rounds": _range(len(record.rows) for record in records),
        "seeds": ", ".join(map(str, seeds)),
        "runs": f"{len(records)}" if finished == len(records) else f"{len(records)} ({finished} finished)",
        "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }
    what = f"{', '.join(labels[:-1])} and {labels[-1]}" if len(labels) > 1 else labels[0]
    many = f"{len(seeds)} seeds" if len(seeds) > 1 else "one seed"
    lead = f"{what} on {facts['data']} with {facts['model']}, over {many} and {facts['rounds']} rounds."
    grid = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return (
        f'<header>\n<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n'
        f'<dl class="facts">{grid}</dl>\n</header>\n'
    )


def _name(records: Sequence[RunRecord], table: str) -> str:
    """Prefer the path of the data or model to the name of its loader."""
    tables = [record.config.get(table) or {} for record in records]
    names = (Path(str(config.get("path") or config.get("name", "unnamed " + table))).name for config in tables)
    return ", ".join(dict.fromkeys(names))


def _range(counts: Iterable[int]) -> str:
    seen = sorted(set(counts))
    return str(seen[0]) if len(seen) == 1 else f"{seen[0]} to {seen[-1]}"


def _comparison(records: Sequence[RunRecord], comparison: Comparison) -> str:
    look = styles(by_label(records))
    tables = "".join(
        f"<h3>{escape(title)}</h3>\n{_one(shown, look)}" for title, shown in by_question(comparison).items()
    )
    return f"<section>\n<h2>Comparison</h2>\n{tables}{_notes(comparison.comments)}</section>\n"


def _one(shown: Sequence[Column], look: Mapping[str, Style]) -> str:
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
        cells = "".join(f"<td{edge}>{_cell(column.cells[row])}</td>" for edge, column in zip(edges, rest, strict=True))
        body.append(f'<tr><th scope="row" class="name">{_swatch(look[label])}{escape(label)}</th>{cells}</tr>\n')
    return (
        f'<div class="wide"><table>\n<thead><tr class="group">{groups}</tr>'
        f'<tr><th class="name">{escape(name.heading)}</th>{headings}</tr></thead>\n'
        f"<tbody>\n{''.join(body)}</tbody></table></div>\n"
    )


def _cell(text: str) -> str:
    """Set the spread or interval after a value in small type."""
    value, space, rest = text.partition(" ")
    return f"{escape(value)}{space}<small>{escape(rest)}</small>" if rest[:1] in ("±", "[") else escape(text)


def _swatch(style: Style) -> str:
    dash = (
        "" if style.dash == "solid" else f' stroke-dasharray="{" ".join(str(3 * length) for length in style.dash[1])}"'
    )
    line = f'<line x1="0" y1="5" x2="26" y2="5" stroke="{style.colour}" stroke-width="4"{dash}/>'
    return f'<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true">{line}</svg>'


def _notes(comments: Iterable[str]) -> str:
    items = ""
    for comment in comments:
        about, colon, rest = comment.partition(": ")
        items += f"<li><b>{escape(about)}</b>{colon}{escape(rest)}</li>" if colon else f"<li>{escape(comment)}</li>"
    return f'<ul class="notes">{items}</ul>\n' if items else ""


def _figures(records: Sequence[RunRecord], metric: str) -> str:
    repeated = any(len(runs) > 1 for runs in by_label(records).values())
    spread = "the band is ± one sample standard deviation" if repeated else "there is one seed, so no spread"
    if repeated and not all(run.finished for run in records):
        spread += "; if a run is unfinished, the mean is over the seeds that reached the round"
    spread += "."
    marked = any(plan_stages.changes(runs) for runs in by_label(records).values())
    marks = (
        f" Dashed vertical lines: changes of a label's plan (if there are at most {plan_stages.CHANGES_MARKED})."
        if marked
        else ""
    )
    figures: list[tuple[str, Callable[[], Figure | None], str, str]] = [
        (
            "rounds",
            lambda: plots.metric_by_round(records, metric),
            f"{metric.capitalize()} by round.",
            f"Test {metric} after each round, mean over seeds; {spread}{marks}",
        ),
        (
            "bytes",
            lambda: plots.metric_by_bytes(records, metric),
            f"{metric.capitalize()} by megabytes sent up.",
            f"The same values over the megabytes that all clients together have sent to the server; {spread}",
        ),
        (
            "drift",
            lambda: plots.drift_by_role(records),
            "Drift by role.",
            "Distance of the clients' updates from their mean, relative to its norm (0: all agree), by role of the "
            "parameters, mean over seeds (no spread shown). A line ends when the role is no longer sent up.",
        ),
        (
            "personal",
            lambda: plots.personal_by_client(records, metric),
            "Individual clients.",
            f"Each dot is the {metric} of one client and seed on the client's own test set, sorted from the bottom of "
            "its strip. The line is the mean over clients, the diamond the mean of the worst tenth, both averaged over "
            "seeds.",
        ),
        (
            "gain",
            lambda: plots.gain_by_client(records, metric),
            "Do clients gain from federation?",
            "Difference between each client's result and its result with local training, for the same seed and test "
            "set. Clients to the right of the line gain; clients to the left would do better alone.",
        ),
    ]
    drawn = "".join(_figure(name, make(), head, caption) for name, make, head, caption in figures)
    return f"<section>\n<h2>Figures</h2>\n{drawn}</section>\n" if drawn else ""


def _choice(records: Sequence[RunRecord]) -> str:
    chose = layer_selection.has_selection(records)
    if not chose:
        return ""
    overlaps = [(label, *layer_selection.overlap_between_rounds(runs)) for label, runs in chose.items()]
    parts = [
        _figure(
            "layers",
            layer_selection.layers_by_round(records),
            "Layers that clients sent.",
            "Fraction of the round's clients, over all seeds, that chose a layer.",
        ),
        _table(("label", "overlap with the previous choice", "overlap of two clients"), overlaps),
    ]
    return f"<section>\n<h2>Choice of layers</h2>\n{''.join(parts)}</section>\n"


def _alarms(records: Sequence[RunRecord]) -> str:
    lines = list(layer_selection.alarms_raised(records))
    return f"<section>\n<h2>Alarms</h2>\n{_notes(lines)}</section>\n" if lines else ""


def _privacy(records: Sequence[RunRecord]) -> str:
    guarantees, attacks = privacy.promises(records), privacy.findings(records)
    if not guarantees and not attacks:
        return ""
    parts = ["<section>\n<h2>Privacy</h2>\n"]
    if guarantees:
        headings = ("label", "unit", "budget", "ε spent", "δ", "noise × clip", "accountant")
        parts.append(_table(headings, guarantees))
        parts.append(
            _figure(
                "epsilon",
                privacy.epsilon_by_round(records),
                "Epsilon by round.",
                "Epsilon of the worst-off client after each round, one line per seed. Smaller is more private.",
            )
        )
    if left_out := privacy.not_covered(records):
        parts.append(f"<h3>Not covered by the guarantee</h3>\n{_notes(left_out)}")
    if attacks:
        parts.append(_table(("run", "attack", "AUC", "TPR at 1% FPR", "members / non-members"), attacks))
        parts.append(
            _figure(
                "attacks",
                privacy.attack_curves(records),
                "Membership inference.",
                "True positive rate over false positive rate for all thresholds of the attack's score. On the dashed "
                "line an attack is no better than chance.",
            )
        )
        parts.append(_notes(privacy.bounds(records)))
    return "".join([*parts, "</section>\n"])


def _figure(name: str, figure: Figure | None, head: str, caption: str) -> str:
    if figure is None:
        return ""
    drawing = svg(figure, name).replace("<svg", f'<svg role="img" aria-label="{escape(head)}"', 1)
    return (
        f'<figure id="{name}">\n<div class="wide">{drawing}</div>\n'
        f"<figcaption><b>{escape(head)}</b> {escape(caption)}</figcaption>\n</figure>\n"
    )


def _lost(records: Sequence[RunRecord]) -> str:
    """Group lost clients by label and reason."""
    by_reason: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
    for record in records:
        for row in record.rows:
            for client, reason in (row.get("lost") or {}).items():
                by_reason.setdefault((record.label, str(reason)), []).append((record.seed, row["round"] + 1, client))
    if not by_reason:
        return ""
    body = [(label, reason, str(len(cases)), _places(cases)) for (label, reason), cases in by_reason.items()]
    return (
        "<section>\n<h2>Lost clients</h2>\n<p>Clients that were sampled in a round but gave no usable reply.</p>\n"
        f"{_table(('label', 'reason', 'times', 'where'), body)}</section>\n"
    )


def _places(cases: Sequence[tuple[int, int, str]]) -> str:
    named = [f"{client} (seed {seed}, round {round})" for seed, round, client in cases[:4]]
    return "; ".join([*named, f"and {len(cases) - 4} more"] if len(cases) > 4 else named)


def _plans(records: Sequence[RunRecord]) -> str:
    plans = plan_stages.plans(records)
    if not plans:
        return ""
    figure = _figure(
        "plan",
        plan_stages.plan_grid(records),
        "The plan.",
        "What happens to each role in each layer, by stage. A cell of two colors is divided by numbers of parameters, "
        "and an empty cell has no parameters. Labels with equal plans share a panel.",
    )
    body = [
        (
            ", ".join(plan.labels),
            plan_stages.rounds_of(stage),
            *(_part(stage, what) for what in ("trains", "up", "down", "keep")),
        )
        for plan in plans
        for stage in plan.stages
    ]
    table = _table(("label", "stage", "trains", "goes up", "comes down", "stays"), body, kind="text narrow")
    asked = dict.fromkeys(str(stage["client"]) for plan in plans for stage in plan.stages if stage.get("client"))
    comments = [
        f"A stage is a series of rounds with the same plan, here for client {', '.join(asked) or 'of the first seed'}. "
        'Numbers are parameters. "Comes down" is what a client needs; it is sent only what it lacks.'
    ]
    for label, runs in by_label(records).items():
        shown = runs[0].plan
        if shown and any(_spans(run.plan) != _spans(shown) for run in runs):
            comments.append(f"{label}: stages differ between seeds; those of seed {runs[0].seed} are shown.")
    return f"<section>\n<h2>Plan</h2>\n{figure}{table}{_notes(comments)}</section>\n"


def _spans(stages: Sequence[Mapping[str, Any]]) -> list[int]:
    return [stage["first"] for stage in stages]


def _part(stage: Mapping[str, Any], what: str) -> str:
    chosen = [row for row in stage["rows"] if row.get(what)]
    if not chosen:
        return "–"
    count = sum(row.get("parameters", 0) for row in chosen)
    return f"{count:,} ({size(sum(row.get('bytes', 0) for row in chosen))})".replace(",", " ")


def _settings(records: Sequence[RunRecord]) -> str:
    groups = by_label(records)
    flat = {label: settings(runs[0]) for label, runs in groups.items()}
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    differing = [key for key in keys if len({values.get(key) for values in flat.values()}) > 1]
    parts = ["<section>\n<h2>Settings</h2>\n"]
    if differing:
        body = [(label, *(values.get(key, "–") for key in differing)) for label, values in flat.items()]
        parts.append("<p>Settings that differ between the labels, for the first seed of each.</p>\n")
        parts.append(_table(("label", *differing), body))
    for label, runs in groups.items():
        seeds = ", ".join(str(run.seed) for run in runs)
        many = "seeds" if len(runs) > 1 else "seed"
        parts.append(
            f"<details><summary>{escape(label)} <span>{many} {escape(seeds)}</span></summary>\n"
            f"{_pre(_toml(runs[0].config))}</details>\n"
        )
    return "".join([*parts, "</section>\n"])


def _toml(table: Mapping[str, Any], path: str = "") -> str:
    """Format the config as TOML, with tables after plain values."""
    plain = [
        f"{key} = {json.dumps(value, ensure_ascii=False, default=str)}"
        for key, value in table.items()
        if not isinstance(value, Mapping)
    ]
    inner = [
        f"\n[{path}{key}]\n{_toml(value, f'{path}{key}.')}"
        for key, value in table.items()
        if isinstance(value, Mapping)
    ]
    return "\n".join([*plain, *inner])


def _origin(records: Sequence[RunRecord], beside: Path) -> str:
    keys = dict.fromkeys(key for record in records for key in record.environment)
    body = [
        (key, "; ".join(dict.fromkeys(record.environment[key] for record in records if key in record.environment)))
        for key in keys
    ]
    commands = "\n".join(_command(record, beside) for record in records)
    table = _table(("what", "value"), body) if body else "<p>No environment was recorded.</p>\n"
    return (
        f"<section>\n<h2>Reproduce</h2>\n<p>Repeat each run with its settings, from the folder of this page:</p>\n"
        f"{_pre(commands)}\n<h3>Environment</h3>\n{table}</section>\n"
    )


def _command(record: RunRecord, beside: Path) -> str:
    """Return the command that repeats a run in a new folder, because a run never overwrites another."""
    config = Path(os.path.relpath(record.folder, beside), "config.toml").as_posix()
    return f"partita run --config {shlex.quote(config)} --out {shlex.quote(f'again/{record.folder.name}')}"


def _table(headings: Sequence[str], body: Iterable[Sequence[str]], kind: str = "text") -> str:
    top = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>\n" for cells in body)
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{top}</tr></thead>\n'
        f"<tbody>\n{rows}</tbody></table></div>\n"
    )
