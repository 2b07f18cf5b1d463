"""Sections of the report on what happened in the runs. A section without content is an empty string."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from partita.report import layer_selection, plan_stages, plots, privacy
from partita.report.html_elements import html_figure, html_list, html_table
from partita.report.load import RunRecord, by_label
from partita.report.render import size

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figures_section(records: Sequence[RunRecord], metric: str) -> str:
    """Return the section with the curves, the drift, and the results by client; "" if nothing can be drawn."""
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
    drawn = "".join(html_figure(name, make(), head, caption) for name, make, head, caption in figures)
    return f"<section>\n<h2>Figures</h2>\n{drawn}</section>\n" if drawn else ""


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
    lines = list(layer_selection.alarms_raised(records))
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
        "and an empty cell has no parameters. Labels with equal plans share a panel.",
    )
    body = [
        (
            ", ".join(plan.labels),
            plan_stages.rounds_of(stage),
            *(_amount(stage, what) for what in ("trains", "up", "down", "keep")),
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
    for label, runs in by_label(records).items():
        shown = runs[0].plan
        if shown and any(_first_rounds(run.plan) != _first_rounds(shown) for run in runs):
            comments.append(f"{label}: stages differ between seeds; those of seed {runs[0].seed} are shown.")
    return f"<section>\n<h2>Plan</h2>\n{figure}{table}{html_list(comments)}</section>\n"


def _first_rounds(stages: Sequence[Mapping[str, Any]]) -> list[int]:
    return [stage["first"] for stage in stages]


def _amount(stage: Mapping[str, Any], what: str) -> str:
    chosen = [row for row in stage["rows"] if row.get(what)]
    if not chosen:
        return "–"
    count = sum(row.get("parameters", 0) for row in chosen)
    return f"{count:,} ({size(sum(row.get('bytes', 0) for row in chosen))})".replace(",", " ")
