"""Figures from recorded rows. Every function creates its own Figure and does not use matplotlib's global state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from partita.record.metric import Metric
from partita.report.curves import Curve, curve_of
from partita.report.load import ReportError, RunRecord, by_label, metric_of, number, personal
from partita.report.plan_stages import changes
from partita.report.plot_style import (
    GRID,
    INK,
    MUTED,
    ROLES,
    Style,
    legend,
    legend_height,
    new_figure,
    shorten,
    style_axes,
    styles,
    whole_rounds,
)
from partita.report.tables import gains, local_baseline, mean, worst_tenth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


ClientValues = Mapping[int, Mapping[str, float]]  # seed -> client -> value


def metric_by_round(records: Sequence[RunRecord], name: str | None = None) -> Figure | None:
    """Draw the test metric by round. None if no run was tested."""
    metric = metric_of(records, name)
    curves = _curves(records, metric)
    if not curves:
        return None
    figure = new_figure(9.2, 3.8 + legend_height(list(curves)))
    axes = figure.add_subplot()
    marked = _draw_rounds(axes, records, curves, metric)
    legend(figure, list(by_label(records)), marked)
    return figure


def metric_by_bytes(records: Sequence[RunRecord], name: str | None = None) -> Figure | None:
    """Draw the test metric by megabytes sent up. None if bytes were not recorded."""
    metric = metric_of(records, name)
    curves = _curves(records, metric)
    if not any(curve.megabytes for curve in curves.values()):
        return None
    figure = new_figure(9.2, 3.8 + legend_height(list(curves)))
    axes = figure.add_subplot()
    _draw_bytes(axes, records, curves, metric)
    legend(figure, list(by_label(records)))
    return figure


def picture(records: Sequence[RunRecord], out: Path | str, metric: str | None = None) -> Path:
    """Write a wide PNG with the test metric by round and by megabytes sent up.

    Args:
        records: The runs.
        out: The file to write.
        metric: The name of the metric; by default, the common metric of the runs.

    Returns:
        The path of the file.

    Raises:
        ReportError: If no run was tested for the metric.
    """
    chosen = metric_of(records, metric)
    curves = _curves(records, chosen)
    if not curves:
        raise ReportError(
            f"no run was ever tested for '{chosen.name}', so there is nothing to draw; choose a recorded metric"
        )
    figure = new_figure(11.5, 3.9 + legend_height(list(curves)))
    left, right = figure.subplots(1, 2, sharey=True)
    marked = _draw_rounds(left, records, curves, chosen)
    _draw_bytes(right, records, curves, chosen)
    right.set_ylabel("")
    left.set_title("By round", loc="left", fontsize=11, color=INK, fontweight="bold")
    right.set_title("By megabytes sent up", loc="left", fontsize=11, color=INK, fontweight="bold")
    legend(figure, list(by_label(records)), marked)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png", dpi=180, facecolor="white")
    return out


def _curves(records: Sequence[RunRecord], metric: Metric) -> dict[str, Curve]:
    curves = {label: curve_of(runs, metric) for label, runs in by_label(records).items()}
    return {label: curve for label, curve in curves.items() if curve.rounds}


def _draw_rounds(axes: Axes, records: Sequence[RunRecord], curves: Mapping[str, Curve], metric: Metric) -> bool:
    """Draw the curves. Return whether a plan change was marked."""
    label_styles = styles(by_label(records))
    for label, curve in curves.items():
        _draw_line(axes, curve.rounds, curve, label_styles[label], len(curves))
    style_axes(axes, "rounds completed", f"test {metric.title_with_unit}{_band_note(curves)}")
    whole_rounds(axes)
    return _mark_stages(axes, records, label_styles)


def _draw_bytes(axes: Axes, records: Sequence[RunRecord], curves: Mapping[str, Curve], metric: Metric) -> None:
    label_styles = styles(by_label(records))
    spent = {label: curve.megabytes for label, curve in curves.items() if curve.megabytes}
    for label, megabytes in spent.items():
        _draw_line(axes, megabytes, curves[label], label_styles[label], len(curves))
        axes.plot(megabytes[-1:], curves[label].mean[-1:], "o", color=label_styles[label].color, markersize=5, zorder=4)
    ends = [megabytes[-1] for megabytes in spent.values()]
    starts = [megabytes[0] for megabytes in spent.values()]
    if ends and min(starts) > 0 and max(ends) > 8 * min(ends):
        axes.set_xscale("log")  # on a linear scale a cheap method would be squeezed to the left edge
    style_axes(axes, "MB sent up so far, all clients", f"test {metric.title_with_unit}{_band_note(curves)}")


def _band_note(curves: Mapping[str, Curve]) -> str:
    return "  (band: ±1 sd over seeds)" if any(any(curve.sd) for curve in curves.values()) else ""


def _draw_line(axes: Axes, x: Sequence[float], curve: Curve, style: Style, count: int) -> None:
    width, alpha = (1.8, 0.16) if count <= 6 else (1.4, 0.07)
    line_style = {"color": style.color, "linestyle": style.dash, "linewidth": width}
    axes.plot(x, curve.mean, marker=_marker(x), markersize=4, zorder=3, **line_style)
    if any(curve.sd):
        low = [value - sd for value, sd in zip(curve.mean, curve.sd, strict=True)]
        high = [value + sd for value, sd in zip(curve.mean, curve.sd, strict=True)]
        axes.fill_between(x, low, high, color=style.color, alpha=alpha, linewidth=0, zorder=2)


def _marker(x: Sequence[float]) -> str | None:
    """Mark points on very short lines, which would be invisible otherwise."""
    return "o" if len(x) < 3 else None


def _mark_stages(axes: Axes, records: Sequence[RunRecord], label_styles: Mapping[str, Style]) -> bool:
    """Draw a vertical line between the last round of a stage and the first of the next."""
    marks: dict[int, list[str]] = {}
    for label, runs in by_label(records).items():
        for first in changes(runs):
            marks.setdefault(first, []).append(label)
    for first, labels in marks.items():
        for place, label in enumerate(labels):
            # Labels that change at the same round alternate along the line, so that each is visible.
            dash = (-6 * place, (6, 6 * (len(labels) - 1))) if len(labels) > 1 else (0, (3, 3))
            axes.axvline(
                first + 0.5, color=label_styles[label].color, linestyle=dash, linewidth=1.2, alpha=0.9, zorder=1
            )
    return bool(marks)


def drift_by_role(records: Sequence[RunRecord], measure: str = "dispersion") -> Figure | None:
    """Draw drift by round, a panel per role and a line per label: the mean over seeds."""
    groups = by_label(records)
    seen = {group for run in records for row in run.rows for group in row.get("drift") or {}}
    roles = [role for role in ROLES if role in seen]
    lines = {
        (role, label): points
        for role in roles
        for label, runs in groups.items()
        if (points := _drift(runs, role, measure))
    }
    roles = [role for role in roles if any(shown == role for shown, _ in lines)]
    if not roles:
        return None
    across = min(4, len(roles))
    down = math.ceil(len(roles) / across)
    figure = new_figure(9.2, 0.4 + 1.95 * down + legend_height(list(groups)))
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    style = styles(groups)
    for panel in panels.flat[len(roles) :]:
        panel.set_visible(False)
    for place, (role, panel) in enumerate(zip(roles, panels.flat, strict=False)):
        for label in groups:
            if (role, label) in lines:
                rounds, values = zip(*lines[role, label], strict=True)
                line_style = {"color": style[label].color, "linestyle": style[label].dash, "linewidth": 1.5}
                panel.plot(rounds, values, marker=_marker(rounds), markersize=4, **line_style)
        below = place + across >= len(roles)
        style_axes(panel, "rounds completed" if below else "", measure if place % across == 0 else "")
        panel.tick_params(labelbottom=below)
        panel.set_title(role, loc="left", fontsize=9, color=INK, fontweight="bold")
        whole_rounds(panel)
    measured = [value for points in lines.values() for _, value in points]
    if min(measured) > 0 and max(measured) > 30 * min(measured):
        panels.flat[0].set_yscale("log")
    legend(figure, list(groups))
    return figure


def _drift(runs: Sequence[RunRecord], role: str, measure: str) -> list[tuple[int, float]]:
    """Return (rounds completed, mean over seeds) for the rounds in which the role was measured."""
    by_round: dict[int, list[float]] = {}
    for run in runs:
        for row in run.rows:
            value = number(((row.get("drift") or {}).get(role) or {}).get(measure))
            if value is not None:
                by_round.setdefault(row["round"] + 1, []).append(value)
    return [(completed, fmean(values)) for completed, values in sorted(by_round.items())]


def personal_by_client(records: Sequence[RunRecord], name: str | None = None) -> Figure | None:
    """Draw each client's result on its own test set, a strip per label."""
    metric = metric_of(records, name)
    return _draw_clients(
        records, personal_values(records, metric), metric, f"a client's personal {metric.title_with_unit}"
    )


def personal_values(records: Sequence[RunRecord], metric: Metric) -> dict[str, ClientValues]:
    """Return the known values of the last personal evaluation, by label, seed and client."""
    return {
        label: {
            run.seed: {client: value for client, value in personal(run, metric.name).items() if value is not None}
            for run in runs
        }
        for label, runs in by_label(records).items()
    }


def _ranked(seeds: ClientValues) -> list[tuple[float, str, int]]:
    """Return (value, client, seed) of all dots of a strip, sorted by value."""
    return sorted((value, client, seed) for seed, clients in seeds.items() for client, value in clients.items())


def gain_by_client(records: Sequence[RunRecord], name: str | None = None) -> Figure | None:
    """Draw each client's gain over local training. Clients on the right of the line gain. None without a baseline."""
    groups, metric = by_label(records), metric_of(records, name)
    unit = "percentage points" if metric.fraction else metric.name
    better = replace(metric, higher_is_better=True)  # a higher gain is better for every metric
    figure = _draw_clients(
        records, gains(groups, metric), better, f"a client's gain over {local_baseline(groups)}, {unit}", metric.scale
    )
    if figure:
        figure.axes[0].axvline(0, color=MUTED, linewidth=1.2, zorder=1)
    return figure


def _draw_clients(
    records: Sequence[RunRecord],
    values: Mapping[str, ClientValues],
    metric: Metric,
    across: str,
    scale: float | None = None,
) -> Figure | None:
    """Draw a strip per label. Clients are sorted by value within it, so a strip is a cumulative distribution."""
    values = {label: seeds for label, seeds in values.items() if any(seeds.values())}
    if not values:
        return None
    label_styles, scale = styles(by_label(records)), metric.scale if scale is None else scale
    figure = new_figure(9.2, 0.8 + 0.58 * len(values))
    axes = figure.add_subplot()
    for row, (label, seeds) in enumerate(values.items()):
        dots = [scale * value for value, _, _ in _ranked(seeds)]
        heights = [row + 0.3 - 0.6 * rank / max(1, len(dots) - 1) for rank in range(len(dots))]
        axes.plot(
            dots, heights, "o", color=label_styles[label].color, markersize=3.6, alpha=0.55, markeredgewidth=0,
            zorder=2,
        )  # fmt: skip
        by_seed = [list(clients.values()) for clients in seeds.values()]
        center, worst = mean([mean(seed) for seed in by_seed]), mean([worst_tenth(seed, metric) for seed in by_seed])
        if center is not None and worst is not None:
            axes.plot([scale * center] * 2, [row - 0.4, row + 0.4], color=INK, linewidth=1.8, zorder=3)
            axes.plot([scale * worst], [row], "D", color="none", markeredgecolor=INK, markersize=5.5, zorder=3)
    axes.set_yticks(range(len(values)), [shorten(label, 28) for label in values])
    axes.set_ylim(len(values) - 0.45, -0.55)
    style_axes(axes, f"{across}   (line: mean, diamond: mean of the worst tenth)", "")
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.tick_params(axis="y", length=0)
    return figure
