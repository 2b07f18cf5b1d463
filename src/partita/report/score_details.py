"""Tables of the last test in detail: by entity type, by subgroup of the central test set, and of unseen clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from partita.record.metric import Metric
from partita.report.elements import Table
from partita.report.load import RunRecord, by_label, metric_of, number, present
from partita.report.render import with_spread
from partita.report.tables import mean, standard_deviation, worst_tenth

SMALL = " *"  # marks a small subgroup
TYPE_SCORES = ("precision", "recall", "f1", "relaxed_f1")
SPREAD = "Mean ± sample standard deviation over seeds"


def details_data(records: Sequence[RunRecord]) -> Mapping[str, Any] | None:
    """Return the scores by entity type, by subgroup and of unseen clients; None if there are none."""
    found = [part for part in (_types(records), _subgroups(records), _unseen(records)) if part]
    return {"parts": found} if found else None


def _last(record: RunRecord, key: str) -> Mapping[str, Any]:
    rows: Sequence[Mapping[str, Any]] = record.rows
    return next((row[key] for row in reversed(rows) if row.get(key)), {})


def _cell(metric: Metric, values: Sequence[Any]) -> str:
    known = [number(value) for value in values]
    return with_spread(metric, mean(known), standard_deviation(known))


def _types(records: Sequence[RunRecord]) -> Mapping[str, Any] | None:
    found = {label: [_last(run, "by_type") for run in runs] for label, runs in by_label(records).items()}
    names = sorted({name for runs in found.values() for types in runs for name in types})
    if not names:
        return None
    metrics = [Metric(name) for name in TYPE_SCORES]
    body = []
    for name in names:
        for label, runs in found.items():
            scores = [types.get(name) or {} for types in runs]
            cells = [_cell(metric, [own.get(metric.name) for own in scores]) for metric in metrics]
            body.append((name, label, _count([own.get("entities") for own in scores]), *cells))
    headings = ("type", "label", "entities", *(metric.title_with_unit for metric in metrics))
    note = (
        "Entities: true entities of the type in the central test set. Relaxed: one common word and the same type are "
        f"enough. {SPREAD}."
    )
    return {"note": note, "table": Table("By entity type", headings, body, kind="numbers"), "comments": ()}


def _count(values: Sequence[Any]) -> str:
    """Format a number of examples, which a test set drawn by the seed has for each seed."""
    known = sorted({int(value) for value in map(number, values) if value is not None})
    return "–" if not known else str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}"


def _subgroups(records: Sequence[RunRecord]) -> Mapping[str, Any] | None:
    shown = [record for record in records if _last(record, "subgroups")]
    if not shown:
        return None
    metric, runs_of = metric_of(shown, None), by_label(shown)
    columns = sorted({str((record.config.get("evaluate") or {}).get("subgroups", "subgroup")) for record in shown})
    found = {label: [_last(run, "subgroups") for run in runs] for label, runs in runs_of.items()}
    names = sorted({name for tests in found.values() for test in tests for name in test["groups"]})
    small = {name for record in shown for name in _small(record)}
    body = []
    for name in names:
        groups = [[test["groups"].get(name) or {} for test in tests] for tests in found.values()]
        count = _count([own.get("examples") for tests in groups for own in tests])
        cells = [_cell(metric, [own.get("value") for own in tests]) for tests in groups]
        body.append((name + (SMALL if name in small else ""), count, *cells))
    gaps = [_cell(metric, [test.get("gap") for test in tests]) for tests in found.values()]
    comments = ["gap: difference between the best and the worst group"]
    if small:
        comments.append("*: fewer examples than evaluate.subgroup_min, so the score is uncertain; not part of the gap")
    heading = f"{metric.title_with_unit.capitalize()} by subgroup of the central test set"
    headings, rows = (", ".join(columns), "examples", *found), [*body, ("gap", "", *gaps)]
    table = Table(heading, headings, rows, kind="numbers", labels=True)
    return {"note": f"{SPREAD}.", "table": table, "comments": comments}


def _unseen(records: Sequence[RunRecord]) -> Mapping[str, Any] | None:
    shown = [record for record in records if _last(record, "unseen")]
    if not shown:
        return None
    metric = metric_of(shown, None)
    body = []
    for label, runs in by_label(shown).items():
        values = [present(map(number, _last(run, "unseen").get(metric.name, {}).values())) for run in runs]
        cells = [
            _cell(metric, [summarize(own) for own in values])
            for summarize in (mean, standard_deviation, lambda own: worst_tenth(own, metric))
        ]
        body.append((label, _count([len(own) for own in values]), *cells))
    headings = ("label", "clients", metric.title_with_unit, "spread", "worst tenth")
    note = (
        "On the test sets of clients that take no part in the federation. Spread is over clients. A model with "
        f"personal parameters has their initial values. {SPREAD}."
    )
    table = Table("Unseen clients", headings, body, kind="numbers", labels=True)
    return {"note": note, "table": table, "comments": ()}


def _small(record: RunRecord) -> list[str]:
    test = _last(record, "subgroups")
    least = number(test.get("minimum")) or 0
    return [name for name, own in test["groups"].items() if (number(own.get("examples")) or 0) < least]
