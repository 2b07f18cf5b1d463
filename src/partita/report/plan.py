"""The plan of each label by stage, and as a picture: groups of parameters by round, with what happens to them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partita.report.layer_selection import chooses_layers, shares_sent
from partita.report.load import RunRecord, by_label
from partita.report.plot_style import UNUSED_COLOR

CHANGES_MARKED = 6
# Name of the CSS class -> sign and meaning. Signs, because not everyone sees colors.
STATUSES = {
    "travels": ("⇅", "trains and travels"),
    "stays": ("■", "trains and stays with the client"),
    "alone": ("▲", "trains, is neither sent nor kept"),
    "comes": ("↓", "frozen, comes down"),
    "kept": ("□", "frozen, stays with the client"),
    "frozen": ("·", "frozen, not sent"),
    "mixed": ("◐", "some parameters like this, some like that"),
}
COLOR = {  # of a status on paper; a page has its own in `page.css`
    "travels": "#0072b2",
    "stays": "#e69f00",
    "alone": "#cc79a7",
    "comes": "#a6cfe9",
    "kept": "#f6dca8",
    "frozen": UNUSED_COLOR,
    "mixed": "#b9a6c9",
}
OUTSIDE = "outside the layers"
MAX_ROWS = 80
MAX_COLUMNS = 60

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


def rounds_of(stage: Mapping[str, Any]) -> str:
    """Format the rounds of a stage."""
    first, last = stage["first"] + 1, stage["last"] + 1
    return f"round {first}" if first == last else f"rounds {first} to {last}"


def layer_order(layer: str | None) -> tuple[bool, int, str]:
    """Sort parameters outside the layers first, then layers by number."""
    digits = re.findall(r"\d{1,9}", layer or "")
    return layer is not None, int(digits[-1]) if digits else -1, layer or ""


@dataclass(frozen=True)
class Cell:
    """What happens to a group of parameters in a stage."""

    status: str  # a key of `STATUSES`
    share: str = ""  # how often clients sent it, where they choose

    @property
    def sign(self) -> str:
        """The sign of the status."""
        return STATUSES[self.status][0]

    @property
    def meaning(self) -> str:
        """The status in words."""
        return STATUSES[self.status][1] + (f", in {self.share} of the cases" if self.share else "")


@dataclass(frozen=True)
class PlanPicture:
    """A picture of the plan that some labels share."""

    title: str
    grouped_by: str
    columns: Sequence[str]  # rounds of each stage
    rows: Sequence[tuple[str, Sequence[Cell]]]  # name of the group, and its cell in each stage
    left_out: str  # what is not shown; "" if all is

    @property
    def legend(self) -> list[tuple[str, str, str]]:
        """CSS class, sign and meaning of the statuses that occur."""
        used = {cell.status for _, cells in self.rows for cell in cells}
        return [(name, *STATUSES[name]) for name in STATUSES if name in used]


def status_of(parameter: Parameter) -> str:
    """Return what happens to a parameter, a key of `STATUSES`."""
    if parameter.get("trains"):
        return "stays" if parameter.get("keep") else "travels" if parameter.get("up") else "alone"
    return "kept" if parameter.get("keep") else "comes" if parameter.get("down") else "frozen"


def plan_picture(plan: PlanStages) -> PlanPicture:
    """Return the picture of a plan. Parameters are grouped as coarsely as all of a group fare alike in every stage."""
    stages = plan.stages[:MAX_COLUMNS]
    name, groups = _coarsest(stages, ("layer", "layer and role") if plan.choosing else tuple(GROUPINGS))
    left = [f"{len(groups) - MAX_ROWS} more groups"] if len(groups) > MAX_ROWS else []
    left += [f"{len(plan.stages) - MAX_COLUMNS} more stages"] if len(plan.stages) > MAX_COLUMNS else []
    ordered = list(groups) if name == "role" else sorted(groups, key=_layers_by_number)
    return PlanPicture(
        ", ".join(plan.labels),
        name,
        [_rounds(stage) for stage in stages],
        [
            (group, [_cell(plan, stage, rows) for stage, rows in zip(stages, groups[group], strict=True)])
            for group in ordered[:MAX_ROWS]
        ],
        " and ".join(left),
    )


def _coarsest(
    stages: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> tuple[str, dict[str, list[list[Parameter]]]]:
    """Return the first grouping in which all parameters of a group fare alike; the last one if there is none."""
    for name in names[:-1]:
        groups = _grouped(stages, GROUPINGS[name])
        if all(len({status_of(row) for row in rows}) < 2 for by_stage in groups.values() for rows in by_stage):
            return name, groups
    return names[-1], _grouped(stages, GROUPINGS[names[-1]])


def _grouped(stages: Sequence[Mapping[str, Any]], key: Callable[[Parameter], str]) -> dict[str, list[list[Parameter]]]:
    """Return the parameters of each group, by stage."""
    names = dict.fromkeys(key(row) for stage in stages for row in stage["rows"])
    by_stage: dict[str, list[list[Parameter]]] = {name: [[] for _ in stages] for name in names}
    for place, stage in enumerate(stages):
        for row in stage["rows"]:
            by_stage[key(row)][place].append(row)
    return by_stage


def _cell(plan: PlanStages, stage: Mapping[str, Any], rows: Sequence[Parameter]) -> Cell:
    found = {status_of(row) for row in rows}
    status = found.pop() if len(found) == 1 else "mixed" if found else "frozen"
    if not plan.choosing or status != "travels":
        return Cell(status)
    share = plan.shares_sent(stage)
    sizes = [max(row.get("parameters", 1), 1) for row in rows]
    mean = sum(share(row) * size for row, size in zip(rows, sizes, strict=True)) / sum(sizes)
    return Cell(status, f"{mean:.0%}")


def _rounds(stage: Mapping[str, Any]) -> str:
    first, last = stage["first"] + 1, stage["last"] + 1
    return str(first) if first == last else f"{first}–{last}"


def _role(row: Parameter) -> str:
    return row.get("role") or "other"


def _layer(row: Parameter) -> str:
    return row.get("layer") or OUTSIDE


def _layers_by_number(group: str) -> tuple[bool, int, str]:
    return layer_order(None if group.startswith(OUTSIDE) else group)


GROUPINGS: Mapping[str, Callable[[Parameter], str]] = {  # from coarse to fine
    "role": _role,
    "layer": _layer,
    "layer and role": lambda row: f"{_layer(row)}, {_role(row)}",
}
