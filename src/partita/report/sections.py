"""Sections of the report on what happened in the runs, as data for their templates. None: nothing to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from partita.record.metric import Metric
from partita.report import chart_data, layer_selection, plan, privacy, split
from partita.report.elements import Table
from partita.report.load import RunRecord, by_label, by_number
from partita.report.render import size, with_spread
from partita.report.tables import mean, standard_deviation

Data = Mapping[str, Any]  # values for the template of a section
CLIENTS_OPEN = 12  # a table of more clients is collapsed
CLIENTS_LISTED = 500
LAYERS_LISTED = 32
SAMPLE_LENGTH = 1000  # characters of a sample text that are shown


def figures_data(records: Sequence[RunRecord], metric: Metric) -> Data | None:
    """Return the curves, the drift, and the results by client."""
    charts = [
        chart_data.curves_chart(records, metric),
        chart_data.drift_chart(records),
        chart_data.clients_chart(records, metric, by_number),
    ]
    drawn = [chart for chart in charts if chart]
    return {"charts": drawn, **_clients_table(records, metric)} if drawn else None


def _clients_table(records: Sequence[RunRecord], metric: Metric) -> Data:
    """Return the table of each client's own scores. A long one is collapsed."""
    values = {
        label: seeds for label, seeds in chart_data.personal_values(records, metric).items() if any(seeds.values())
    }
    clients = sorted({client for seeds in values.values() for own in seeds.values() for client in own}, key=by_number)
    body = []
    for client in clients[:CLIENTS_LISTED]:
        cells = []
        for seeds in values.values():
            known = [own[client] for own in seeds.values() if client in own]
            cells.append(with_spread(metric, mean(known), standard_deviation(known)))
        body.append((client, *cells))
    heading = f"{metric.title_with_unit.capitalize()} of each client on its own test set"
    return {
        "clients": Table(heading, ("client", *values), body, kind="numbers", labels=True) if clients else None,
        "clients_count": len(clients),
        "clients_open": len(clients) <= CLIENTS_OPEN,
        "clients_left": len(clients) - len(body),
    }


def samples_data(records: Sequence[RunRecord]) -> Data | None:
    """Return the answers to some test examples, before and after training."""
    parts = []
    for label, runs in by_label(records).items():
        run = next((run for run in runs if run.samples), None)
        if run is not None:
            keys = ("prompt", "reference", "before", "after")
            body = [[_shortened(sample[key]) for key in keys] for sample in run.samples]
            headings = ("prompt", "reference", "before training", "after training")
            images = [sample["image"] for sample in run.samples if "image" in sample]
            table = Table(f"{label}, seed {run.seed}", headings, body)
            parts.append({"table": table, "images": images if len(images) == len(body) else []})
    return {"parts": parts} if parts else None


def _shortened(text: str) -> str:
    return text if len(text) <= SAMPLE_LENGTH else f"{text[:SAMPLE_LENGTH]}…"


def split_data(records: Sequence[RunRecord]) -> Data | None:
    """Return what clients hold, and which runs withheld it."""
    shown = split.splits(records)
    private = [label for label, runs in by_label(records).items() if runs[0].privacy]
    if not shown and not private:
        return None
    titled = [(each, each.title(len(shown) == 1)) for each in shown[: split.PANELS]]
    withheld = [
        f"{label}: a private run does not record its clients' numbers of examples and labels." for label in private
    ]
    return {
        "pictures": [{**split.picture(each), "title": title} for each, title in titled],
        "tables": [split.client_table(each, f"Clients' examples: {title}") for each, title in titled],
        "notes": [*_listed(shown), *withheld],
    }


def _listed(shown: Sequence[split.Split]) -> list[str]:
    """Say for which splits only some clients are listed."""
    return [
        f"{each.title(len(shown) == 1)}: the first {len(each.clients)} of {each.population} clients."
        for each in shown
        if each.population > len(each.clients)
    ]


def layers_data(records: Sequence[RunRecord]) -> Data | None:
    """Return which layers clients sent."""
    selections = layer_selection.has_selection(records)
    if not selections:
        return None
    overlaps = [(label, *layer_selection.overlap_between_rounds(runs)) for label, runs in selections.items()]
    headings = ("label", "overlap with the previous choice", "overlap of two clients")
    return {
        "pictures": layer_selection.pictures(records),
        "table": Table("Overlap of choices", headings, overlaps, labels=True),
    }


def alarms_data(records: Sequence[RunRecord]) -> Data | None:
    """Return the alarms."""
    lines = layer_selection.alarms_raised(records)
    return {"notes": lines} if lines else None


def privacy_data(records: Sequence[RunRecord]) -> Data | None:
    """Return guarantees and attacks."""
    guarantees, attacks = privacy.guarantees(records), privacy.attack_results(records)
    if not guarantees and not attacks:
        return None
    headings = ("label", "unit", "budget", "ε spent", "δ", "noise × clip", "noise added", "accountant")
    attack_headings = ("run", "attack", "AUC", "TPR at 1% FPR", "members / non-members")
    epsilon = chart_data.epsilon_chart(records) if guarantees else None
    curves = chart_data.attacks_chart(records) if attacks else None
    return {
        "guarantees": Table("Guarantees", headings, guarantees, labels=True) if guarantees else None,
        "epsilon": epsilon,
        "not_covered": privacy.not_covered(records),
        "attacks": Table("Attacks", attack_headings, attacks) if attacks else None,
        "curves": curves,
        "bounds": privacy.bounds(records) if attacks else [],
        "charts": [chart for chart in (epsilon, curves) if chart],
    }


def lost_clients_data(records: Sequence[RunRecord]) -> Data | None:
    """Return lost clients, grouped by label and reason."""
    by_reason: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
    for record in records:
        for row in record.rows:
            for client, reason in (row.get("lost") or {}).items():
                by_reason.setdefault((record.label, str(reason)), []).append((record.seed, row["round"] + 1, client))
    if not by_reason:
        return None
    body = [(label, reason, str(len(cases)), _places(cases)) for (label, reason), cases in by_reason.items()]
    return {"table": Table("Lost clients", ("label", "reason", "times", "where"), body, labels=True)}


def _places(cases: Sequence[tuple[int, int, str]]) -> str:
    named = [f"{client} (seed {seed}, round {round})" for seed, round, client in cases[:4]]
    return "; ".join([*named, f"and {len(cases) - 4} more"] if len(cases) > 4 else named)


def plan_data(records: Sequence[RunRecord]) -> Data | None:
    """Return the plan by stage."""
    plans = plan.plans(records)
    if not plans:
        return None
    body = [
        (
            ", ".join(each.labels),
            plan.rounds_of(stage),
            *(
                _amount(stage, what, each.choosing and what in ("trains", "up"))
                for what in ("trains", "up", "down", "keep")
            ),
        )
        for each in plans
        for stage in each.stages
    ]
    headings = ("label", "stage", "trains", "goes up", "comes down", "stays")
    asked = dict.fromkeys(str(stage["client"]) for each in plans for stage in each.stages if stage.get("client"))
    comments = [
        f"A stage is a series of rounds with the same plan, here for client {', '.join(asked) or 'of the first seed'}. "
        'Numbers are parameters. "Comes down" is what a client needs; it is sent only what it lacks.'
    ]
    for each in plans:
        if each.choosing:
            comments.append(f"{each.labels[0]}: clients choose layers out of this plan. {_sent_layers(each)}")
    for label, runs in by_label(records).items():
        shown = runs[0].plan
        if shown and any(_first_rounds(run.plan) != _first_rounds(shown) for run in runs):
            comments.append(f"{label}: stages differ between seeds; those of seed {runs[0].seed} are shown.")
    table = Table("The plan by stage", headings, body, kind="text narrow")
    pictures = [plan.plan_picture(each) for each in plans]
    return {"pictures": pictures, "table": table, "notes": comments}


def _sent_layers(stages: plan.PlanStages) -> str:
    """Say how often each layer was sent over the whole run."""
    whole = {"first": stages.stages[0]["first"], "last": stages.stages[-1]["last"]}
    layers = sorted(
        {row["layer"] for stage in stages.stages for row in stage["rows"] if row.get("layer") and row.get("up")},
        key=by_number,
    )
    share = stages.shares_sent(whole)
    told = [f"{layer.removeprefix('layer.')} ({share({'layer': layer}):.0%})" for layer in layers[:LAYERS_LISTED]]
    more = f" and {len(layers) - LAYERS_LISTED} more layers" if len(layers) > LAYERS_LISTED else ""
    return f"Clients sent each layer in this share of their rounds: {', '.join(told)}{more}." if told else ""


def _first_rounds(stages: Sequence[Mapping[str, Any]]) -> list[int]:
    return [stage["first"] for stage in stages]


def _amount(stage: Mapping[str, Any], what: str, at_most: object) -> str:
    chosen = [row for row in stage["rows"] if row.get(what)]
    if not chosen:
        return "–"
    count = sum(row.get("parameters", 0) for row in chosen)
    shown = f"{count:,} ({size(sum(row.get('bytes', 0) for row in chosen))})".replace(",", " ")
    return f"at most {shown}" if at_most else shown
