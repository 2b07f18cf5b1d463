"""The plan of each label by stage, as a table and as a figure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from partita.report.layer_selection import chooses_layers, shares_sent
from partita.report.load import RunRecord, by_label
from partita.report.plot_style import INK, ROLES, UNUSED_COLOR, new_figure, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STATUSES = {  # what happens to a parameter in a stage
    "trains and goes up": "#0072b2",
    "comes down, does not train": "#a6cfe9",
    "stays with the client": "#e69f00",
    "untouched": UNUSED_COLOR,
}
SENT = next(iter(STATUSES))
STAGES_SHOWN = 4
CHANGES_MARKED = 6

Parameter = Mapping[str, Any]  # a row of the plan


@dataclass(frozen=True)
class PlanStages:
    """Labels that share a plan, and its stages."""

    labels: list[str]  # the labels that share the plan
    stages: Sequence[Mapping[str, Any]]
    choosing: Sequence[RunRecord] = ()  # the label's runs, if its clients chose layers out of the plan

    def shares_sent(self, stage: Mapping[str, Any]) -> Callable[[Parameter], float]:
        """Return a function that says how often a parameter that may go up was sent in a stage."""
        if not self.choosing:
            return lambda row: 1.0
        shares = shares_sent(self.choosing, stage["first"], stage["last"])
        return lambda row: shares.get(row.get("layer") or row.get("name") or "", 0.0)


def plans(records: Sequence[RunRecord]) -> list[PlanStages]:
    """Return the plans of each label's first seed.

    Labels with equal plans are grouped, except those whose clients choose layers: what they send is their own.
    """
    grouped: dict[str, PlanStages] = {}
    for label, runs in by_label(records).items():
        if runs[0].plan:
            choosing = runs if chooses_layers(runs) else ()
            alone = label if choosing else None
            key = json.dumps([alone, *({**stage, "client": None} for stage in runs[0].plan)], sort_keys=True)
            grouped.setdefault(key, PlanStages([], runs[0].plan, choosing)).labels.append(label)
    return list(grouped.values())


def changes(runs: Sequence[RunRecord]) -> list[int]:
    """Return the first round of each later stage that any seed reached. Empty if there are too many to mark."""
    starts = {stage["first"] for run in runs for stage in run.plan[1:] if stage["first"] <= run.rows[-1]["round"]}
    return sorted(starts) if len(starts) <= CHANGES_MARKED else []


def status(row: Parameter) -> str:
    """Return the status of a parameter, a key of `STATUSES`."""
    trained, received, kept, untouched = STATUSES
    if row.get("keep"):
        return kept
    if row.get("up"):
        return trained
    return received if row.get("down") else untouched


def plan_grid(records: Sequence[RunRecord]) -> Figure | None:
    """Draw layers × roles, a panel per stage. A cell is divided by the number of parameters of each status."""
    shown = [(plan, stage) for plan in plans(records) for stage in plan.stages[:STAGES_SHOWN]]
    if not shown:
        return None
    from matplotlib.patches import Patch

    parameters = [row for _, stage in shown for row in stage["rows"]]
    layers = sorted({row.get("layer") for row in parameters}, key=layer_order)
    known = {_role(row) for row in parameters}
    statuses = {status(row) for row in parameters}
    if any(plan.choosing for plan, _ in shown):
        statuses |= {status({**row, "up": False}) for row in parameters if status(row) == SENT}
    roles = [*(role for role in ROLES if role in known), *sorted(known - set(ROLES))]
    across = 3  # fixed, so that cells keep their shape if there are fewer panels
    down = math.ceil(len(shown) / across)
    height = min(4.5, 0.9 + 0.2 * len(layers))
    figure = new_figure(9.2, 0.5 + (height + 0.75) * down)
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for panel in panels.flat[len(shown) :]:
        panel.set_visible(False)
    for place, ((plan, stage), panel) in enumerate(zip(shown, panels.flat, strict=False)):
        share = plan.shares_sent(stage)
        for row, layer in enumerate(layers):
            for column, role in enumerate(roles):
                cell = [item for item in stage["rows"] if item.get("layer") == layer and _role(item) == role]
                _draw_cell(panel, column, row, [(item, share(item)) for item in cell])
        panel.set_xlim(-0.5, len(roles) - 0.5)
        panel.set_ylim(len(layers) - 0.5, -0.5)
        panel.set_xticks(range(len(roles)), [shorten(role, 20) for role in roles], rotation=90, fontsize=8)
        panel.set_yticks(range(len(layers)), [shorten(layer or "outside", 20) for layer in layers], fontsize=8)
        panel.tick_params(length=0, colors=INK, labelbottom=place + across >= len(shown))
        panel.spines[:].set_visible(False)
        panel.set_title(_stage_title(plan, stage), loc="left", fontsize=8.5, color=INK)
    figure.legend(
        handles=[Patch(facecolor=STATUSES[name], label=name) for name in STATUSES if name in statuses],
        loc="outside upper left", ncols=4, frameon=False, fontsize=8.5, labelcolor=INK,
    )  # fmt: skip
    return figure


def _role(row: Parameter) -> str:
    return row.get("role") or "other"


def _draw_cell(panel: Axes, column: int, row: int, cell: Sequence[tuple[Parameter, float]]) -> None:
    """Draw one cell from its parameters, each with how often it was sent if it may go up."""
    from matplotlib.patches import Rectangle

    counts = dict.fromkeys(STATUSES, 0.0)
    for item, share in cell:
        amount, planned = item.get("parameters", 1), status(item)
        sent = share if planned == SENT else 1.0
        counts[planned] += sent * amount
        counts[status({**item, "up": False})] += (1 - sent) * amount
    total, left = sum(counts.values()), column - 0.45
    for name, count in counts.items():
        if count:
            width = 0.9 * count / total
            panel.add_patch(Rectangle((left, row - 0.43), width, 0.86, facecolor=STATUSES[name], linewidth=0))
            left += width


def layer_order(layer: str | None) -> tuple[bool, int, str]:
    """Sort parameters outside the layers first, then layers by number."""
    digits = re.findall(r"\d{1,9}", layer or "")
    return layer is not None, int(digits[-1]) if digits else -1, layer or ""


def _stage_title(plan: PlanStages, stage: Mapping[str, Any]) -> str:
    labels = ", ".join(plan.labels[:2]) + (f" and {len(plan.labels) - 2} more" if len(plan.labels) > 2 else "")
    cut = len(plan.stages) > STAGES_SHOWN and stage is plan.stages[STAGES_SHOWN - 1]
    more = f" (and {len(plan.stages) - STAGES_SHOWN} more stages)" if cut else ""
    choice = ", as clients chose" if plan.choosing else ""
    return f"{shorten(labels, 34)}\n{rounds_of(stage)}{choice}{more}"


def rounds_of(stage: Mapping[str, Any]) -> str:
    """Format the rounds of a stage."""
    first, last = stage["first"] + 1, stage["last"] + 1
    return f"round {first}" if first == last else f"rounds {first} to {last}"
