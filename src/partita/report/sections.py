"""Sections of the report on what happened in the runs. A section without content is an empty string."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from partita.report import layer_selection, plan_stages, plots, privacy, split_figure
from partita.report.html_elements import collapsible, escape, html_figure, html_list, html_table
from partita.report.load import RunRecord, by_label, metric_of
from partita.report.plot_style import PointTitles
from partita.report.render import size, with_spread
from partita.report.tables import mean, standard_deviation

if TYPE_CHECKING:
    from matplotlib.figure import Figure


CLIENTS_OPEN = 12  # a table of more clients is collapsed
CLIENTS_LISTED = 500
LAYERS_LISTED = 32
SAMPLE_LENGTH = 1000  # characters of a sample text that are shown


def figures_section(records: Sequence[RunRecord], metric: str) -> str:
    """Return the section with the curves, the drift, and the results by client; "" if nothing can be drawn."""
    repeated = any(len(runs) > 1 for runs in by_label(records).values())
    spread = "the band is ± one sample standard deviation" if repeated else "there is one seed, so no spread"
    if repeated and any(run.stopped or not run.finished for run in records):
        spread += "; if a run is unfinished or stopped early, the mean is over the seeds that reached the round"
    spread += "."
    marked = any(plan_stages.changes(runs) for runs in by_label(records).values())
    marks = (
        f" Dashed vertical lines: changes of a label's plan (if there are at most {plan_stages.CHANGES_MARKED})."
        if marked
        else ""
    )
    titles: dict[str, Callable[[], PointTitles]] = {
        "personal": lambda: plots.personal_titles(records, metric),
        "gain": lambda: plots.gain_titles(records, metric),
    }
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
            "its strip; point at a dot to see which. The line is the mean over clients, the diamond the mean of the "
            "worst tenth, both averaged over seeds.",
        ),
        (
            "gain",
            lambda: plots.gain_by_client(records, metric),
            "Do clients gain from federation?",
            "Difference between each client's result and its result with local training, for the same seed and test "
            "set. Clients to the right of the line gain; clients to the left would do better alone.",
        ),
    ]
    drawn = "".join(
        html_figure(name, make(), head, caption, titles[name]() if name in titles else None)
        for name, make, head, caption in figures
    )
    return f"<section>\n<h2>Figures</h2>\n{drawn}{_clients_table(records, metric)}</section>\n" if drawn else ""


def _clients_table(records: Sequence[RunRecord], name: str) -> str:
    """Return the table of each client's own scores; "" if there are none. A long one is collapsed."""
    metric = metric_of(records, name)
    values = {label: seeds for label, seeds in plots.personal_values(records, metric).items() if any(seeds.values())}
    clients = sorted({client for seeds in values.values() for own in seeds.values() for client in own}, key=_by_number)
    if not clients:
        return ""
    body = []
    for client in clients[:CLIENTS_LISTED]:
        cells = []
        for seeds in values.values():
            known = [own[client] for own in seeds.values() if client in own]
            cells.append(with_spread(metric, mean(known), standard_deviation(known)))
        body.append((client, *cells))
    left = len(clients) - len(body)
    note = f"<p>{left} more clients are not listed.</p>\n" if left else ""
    heading = f"{metric.title_with_unit.capitalize()} of each client on its own test set"
    table = html_table(("client", *values), body, kind="numbers") + note
    spread = "Mean ± sample standard deviation over seeds. A random split gives a client other data for each seed."
    if len(clients) > CLIENTS_OPEN:
        return collapsible(f"{heading} ({len(clients)} clients)", f"<p>{spread}</p>\n{table}")
    return f"<h3>{escape(heading)}</h3>\n<p>{spread}</p>\n{table}"


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sort c2 before c10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,15})", name)]


def samples_section(records: Sequence[RunRecord]) -> str:
    """Return the section with answers to some test examples, before and after training; "" if none were recorded."""
    tables = []
    for label, runs in by_label(records).items():
        run = next((run for run in runs if run.samples), None)
        if run is None:
            continue
        keys = ("prompt", "reference", "before", "after")
        body = [[_shortened(sample[key]) for key in keys] for sample in run.samples]
        table = html_table(("prompt", "reference", "before training", "after training"), body)
        tables.append(f"<h3>{escape(f'{label}, seed {run.seed}')}</h3>\n{table}")
    if not tables:
        return ""
    note = (
        "Examples of the central test set, with the answers that the model generates, always the most probable token."
    )
    return f"<section>\n<h2>Samples</h2>\n<p>{note}</p>\n{''.join(tables)}</section>\n"


def _shortened(text: str) -> str:
    return text if len(text) <= SAMPLE_LENGTH else f"{text[:SAMPLE_LENGTH]}…"


def split_section(records: Sequence[RunRecord]) -> str:
    """Return the section on what clients hold; "" if no run recorded it and none withheld it."""
    shown, private = (
        split_figure.splits(records),
        [label for label, runs in by_label(records).items() if runs[0].privacy],
    )
    if not shown and not private:
        return ""
    figure = html_figure(
        "split",
        split_figure.split_grid(records),
        "What clients hold.",
        "Training examples of each client and, for classification, how many of them have which label, for the first "
        "seed. Labels with the same split share a panel.",
    )
    tables = "".join(
        collapsible(
            f"Clients' examples: {split.title(len(shown) == 1)}",
            html_table(
                ("client", "train", "validation", "test", *(["labels in train"] if split.classes else [])),
                split_figure.split_rows(split),
            ),
        )
        for split in shown[: split_figure.PANELS]
    )
    withheld = [
        f"{label}: a private run does not record its clients' numbers of examples and labels." for label in private
    ]
    return f"<section>\n<h2>Data</h2>\n{figure}{tables}{html_list(withheld)}</section>\n"


def layers_section(records: Sequence[RunRecord]) -> str:
    """Return the section on which layers clients sent; "" if no method chose layers."""
    selections = layer_selection.has_selection(records)
    if not selections:
        return ""
    overlaps = [(label, *layer_selection.overlap_between_rounds(runs)) for label, runs in selections.items()]
    parts = [
        html_figure(
            "layers",
            layer_selection.layers_by_round(records),
            "Layers that clients sent.",
            "Fraction of the round's clients, over all seeds, that chose a layer.",
        ),
        html_table(("label", "overlap with the previous choice", "overlap of two clients"), overlaps),
    ]
    return f"<section>\n<h2>Choice of layers</h2>\n{''.join(parts)}</section>\n"


def alarms_section(records: Sequence[RunRecord]) -> str:
    """Return the section with the alarms; "" if there were none."""
    lines = layer_selection.alarms_raised(records)
    return f"<section>\n<h2>Alarms</h2>\n{html_list(lines)}</section>\n" if lines else ""


def privacy_section(records: Sequence[RunRecord]) -> str:
    """Return the section with guarantees and attacks; "" if there are neither."""
    guarantees, attacks = privacy.guarantees(records), privacy.attack_results(records)
    if not guarantees and not attacks:
        return ""
    parts = ["<section>\n<h2>Privacy</h2>\n"]
    if guarantees:
        headings = ("label", "unit", "budget", "ε spent", "δ", "noise × clip", "accountant")
        parts.append(html_table(headings, guarantees))
        parts.append(
            html_figure(
                "epsilon",
                privacy.epsilon_by_round(records),
                "Epsilon by round.",
                "Epsilon of the worst-off client after each round, one line per seed. Smaller is more private.",
            )
        )
    if left_out := privacy.not_covered(records):
        parts.append(f"<h3>Not covered by the guarantee</h3>\n{html_list(left_out)}")
    if attacks:
        parts.append(html_table(("run", "attack", "AUC", "TPR at 1% FPR", "members / non-members"), attacks))
        parts.append(
            html_figure(
                "attacks",
                privacy.attack_curves(records),
                "Membership inference.",
                "True positive rate over false positive rate for all thresholds of the attack's score. On the dashed "
                "line an attack is no better than chance.",
            )
        )
        parts.append(html_list(privacy.bounds(records)))
    return "".join([*parts, "</section>\n"])


def lost_clients_section(records: Sequence[RunRecord]) -> str:
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
        f"{html_table(('label', 'reason', 'times', 'where'), body)}</section>\n"
    )


def _places(cases: Sequence[tuple[int, int, str]]) -> str:
    named = [f"{client} (seed {seed}, round {round})" for seed, round, client in cases[:4]]
    return "; ".join([*named, f"and {len(cases) - 4} more"] if len(cases) > 4 else named)


def plan_section(records: Sequence[RunRecord]) -> str:
    """Return the section with the plan by stage; "" if no run recorded one."""
    plans = plan_stages.plans(records)
    if not plans:
        return ""
    figure = html_figure(
        "plan",
        plan_stages.plan_grid(records),
        "The plan.",
        "What happens to each role in each layer, by stage. A cell of two colors is divided by numbers of parameters, "
        "and an empty cell has no parameters. Labels with equal plans share a panel. Where clients choose layers out "
        "of the plan, the dark part of a cell is how often it was sent, over clients and rounds.",
    )
    body = [
        (
            ", ".join(plan.labels),
            plan_stages.rounds_of(stage),
            *(
                _amount(stage, what, plan.choosing and what in ("trains", "up"))
                for what in ("trains", "up", "down", "keep")
            ),
        )
        for plan in plans
        for stage in plan.stages
    ]
    table = html_table(("label", "stage", "trains", "goes up", "comes down", "stays"), body, kind="text narrow")
    asked = dict.fromkeys(str(stage["client"]) for plan in plans for stage in plan.stages if stage.get("client"))
    comments = [
        f"A stage is a series of rounds with the same plan, here for client {', '.join(asked) or 'of the first seed'}. "
        'Numbers are parameters. "Comes down" is what a client needs; it is sent only what it lacks.'
    ]
    for plan in plans:
        if plan.choosing:
            comments.append(f"{plan.labels[0]}: clients choose layers out of this plan. {_sent_layers(plan)}")
    for label, runs in by_label(records).items():
        shown = runs[0].plan
        if shown and any(_first_rounds(run.plan) != _first_rounds(shown) for run in runs):
            comments.append(f"{label}: stages differ between seeds; those of seed {runs[0].seed} are shown.")
    return f"<section>\n<h2>Plan</h2>\n{figure}{table}{html_list(comments)}</section>\n"


def _sent_layers(plan: plan_stages.PlanStages) -> str:
    """Say how often each layer was sent over the whole run."""
    whole = {"first": plan.stages[0]["first"], "last": plan.stages[-1]["last"]}
    layers = sorted(
        {row["layer"] for stage in plan.stages for row in stage["rows"] if row.get("layer") and row.get("up")},
        key=_by_number,
    )
    share = plan.shares_sent(whole)
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
