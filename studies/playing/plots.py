"""Pictures of a study: the score by round, and maps of the difference to the baseline over the axes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from partita.record.metric import Metric
from partita.report.comparison import Difference
from partita.report.plot_style import INK, MUTED, new_figure, shorten, style_axes, styles, whole_rounds
from playing.choice import built_in
from playing.lines import Line
from playing.study import Study
from playing.tables import summarize

COLUMNS = 3  # panels side by side
LEGEND_LINE = 0.19  # inches
MAP_LEGEND = "hatched: the 95% interval holds zero; no color: no paired runs"


def plot(study: Study, lines: Sequence[Line], score: str | None = None, on: str | None = None) -> list[Path]:
    """Draw all pictures of a study beside its lines.

    Args:
        study: The study.
        lines: The lines of its runs.
        score: Another metric than the study's.
        on: Another part than the study's.

    Returns:
        The files: STUDY.svg with the score by round, STUDY-bytes.svg by what was sent, and STUDY-map.svg if there are
        one or two axes.
    """
    from matplotlib import rc_context

    metric, part = built_in(score or study.score), on or study.on
    pictures = {study.beside.with_suffix(".svg"): _curves(study, lines, metric, part)}
    if any(megabytes(line) for line in lines):
        pictures[study.beside.with_name(f"{study.name}-bytes.svg")] = _curves(study, lines, metric, part, by_bytes=True)
    if len(study.axes) in (1, 2) and len(study.arms) > 1:
        pictures[study.beside.with_name(f"{study.name}-map.svg")] = _maps(study, lines, metric, part)
    for file, figure in pictures.items():
        with rc_context({"svg.hashsalt": study.name}):
            figure.savefig(file, metadata={"Date": None})
    return list(pictures)


def curves(study: Study, lines: Sequence[Line], point: Mapping[str, Any], metric: str, part: str) -> dict[str, Any]:
    """Return by arm the tested rounds, and for each the mean score and the standard deviation over seeds."""
    found = {}
    for arm in study.arms:
        own = [line for line in lines if line["arm"] == arm and line["point"] == dict(point) and line.get(part)]
        own = [line for line in own if None not in line[part].get(metric, [None]) and "diverged" not in line]
        if not own:
            continue
        rounds = own[0][part]["rounds"]
        columns = list(zip(*(line[part][metric] for line in own if line[part]["rounds"] == rounds), strict=True))
        means = [statistics.fmean(column) for column in columns]
        spreads = [statistics.stdev(column) if len(column) > 1 else 0.0 for column in columns]
        found[arm] = rounds, means, spreads
    return found


def megabytes(line: Line) -> list[float]:
    """Return what was sent after each round in all, in both directions; nothing if it is not known or nothing is."""
    sides = list((line.get("bytes") or {}).values())
    total = list(accumulate(sum(each) / 1e6 for each in zip(*sides, strict=True)))
    return total if total and total[-1] else []


def _sent(
    study: Study, lines: Sequence[Line], point: Mapping[str, Any], arm: str, rounds: Sequence[int]
) -> list[float]:
    """Return the mean over seeds of what was sent up to each of these rounds."""
    own = [line for line in lines if line["arm"] == arm and line["point"] == dict(point)]
    known = [sent for line in own if len(sent := megabytes(line)) >= rounds[-1]]
    return [statistics.fmean(sent[number - 1] for sent in known) for number in rounds] if known else []


def _curves(study: Study, lines: Sequence[Line], metric: Metric, part: str, by_bytes: bool = False) -> Any:
    from matplotlib.lines import Line2D

    points = study.points()
    columns = min(COLUMNS, len(points))
    rows = -(-len(points) // columns)
    drawn = [curves(study, lines, point, metric.name, part) for point in points]
    # All arms have a style, so that the others keep theirs when one is played. The legend has those with curves.
    looks = {arm: look for arm, look in styles(study.arms).items() if any(arm in found for found in drawn)}
    figure = new_figure(max(4.6, 3.4 * columns) + 2.2, max(2.9 * rows, LEGEND_LINE * len(looks)) + 0.3)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for place, axes in enumerate(panels.flat):
        if place >= len(points):
            axes.set_visible(False)
            continue
        for arm, (rounds, means, spreads) in drawn[place].items():
            middle = [metric.scale * value for value in means]
            low = [metric.scale * (mean - spread) for mean, spread in zip(means, spreads, strict=True)]
            high = [metric.scale * (mean + spread) for mean, spread in zip(means, spreads, strict=True)]
            marker = "o" if len(rounds) < 8 else None
            across = _sent(study, lines, points[place], arm, rounds) if by_bytes else rounds
            if not across:
                continue
            axes.plot(
                across, middle, color=looks[arm].color, linestyle=looks[arm].dash, linewidth=1.6, marker=marker,
                markersize=3,
            )  # fmt: skip
            axes.fill_between(across, low, high, color=looks[arm].color, alpha=0.15, linewidth=0)
        title = "MB sent and received" if by_bytes else "round"
        style_axes(axes, title if place >= len(points) - columns else "", "")
        if place % columns == 0:
            axes.set_ylabel(metric.title_with_unit, fontsize=9, color=INK)
        if by_bytes:
            axes.set_xscale("log")
        else:
            whole_rounds(axes)
        title = ", ".join(f"{axis.split('.')[-1]} = {value}" for axis, value in points[place].items())
        axes.set_title(shorten(title, 44), fontsize=9, color=INK, loc="left")
    figure.legend(
        handles=[
            Line2D([], [], color=look.color, linestyle=look.dash, linewidth=2, label=" " + shorten(arm, 28))
            for arm, look in looks.items()
        ],
        loc="outside right upper",
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        handlelength=2.4,
    )
    return figure


def differences(study: Study, lines: Sequence[Line], metric: str, part: str) -> dict[tuple[str, str], Difference]:
    """Return the differences to the baseline by arm and point, as far as they are known."""
    return {
        (row.arm, str(point)): row.difference
        for point in study.points()
        for row in summarize(study, lines, point, metric, part)
        if row.difference is not None and row.difference.mean is not None
    }


def _maps(study: Study, lines: Sequence[Line], metric: Metric, part: str) -> Any:
    """Draw a map for each arm over two axes, or one map of the arms over a single axis."""
    known = differences(study, lines, metric.name, part)
    others = [arm for arm in study.arms if arm != study.baseline]
    axes_of = list(study.axes)
    across = list(study.axes[axes_of[-1]])
    if len(axes_of) == 2:
        up = list(study.axes[axes_of[0]])
        grids = {
            arm: [[known.get((arm, str({axes_of[0]: row, axes_of[1]: value}))) for value in across] for row in up]
            for arm in others
        }
        up_title = axes_of[0]
    else:
        up, up_title = others, ""
        grids = {"": [[known.get((arm, str({axes_of[0]: value}))) for value in across] for arm in others]}
    largest = max((metric.scale * abs(each.mean) for each in known.values() if each.mean is not None), default=1.0)
    columns = min(COLUMNS, len(grids))
    rows = -(-len(grids) // columns)
    wide = max(2.4, 0.85 * len(across) + 1.2)
    figure = new_figure(wide * columns + 1.4, (0.5 * len(up) + 1.1) * rows + 0.3)
    panels = figure.subplots(rows, columns, squeeze=False)
    image: Any = None
    for place, axes in enumerate(panels.flat):
        if place >= len(grids):
            axes.set_visible(False)
            continue
        arm, grid = list(grids.items())[place]
        image = draw_map(axes, grid, metric, largest)
        axes.set_xticks(range(len(across)), [shorten(str(value), 14) for value in across], fontsize=8.5)
        axes.set_yticks(range(len(up)), [shorten(str(value), 28) for value in up], fontsize=8.5)
        axes.set_xlabel(axes_of[-1], fontsize=9, color=INK)
        axes.set_ylabel(up_title, fontsize=9, color=INK)
        axes.set_title(shorten(arm, 34), fontsize=9, color=INK, loc="left")
    bar = figure.colorbar(image, ax=panels, shrink=0.9)
    bar.set_label(f"{metric.title_with_unit}, to {shorten(study.baseline, 24)}", fontsize=8.5, color=INK)
    bar.ax.tick_params(labelsize=8)
    figure.supxlabel(MAP_LEGEND, fontsize=8, color=MUTED)
    return figure


def draw_map(axes: Any, grid: Sequence[Sequence[Difference | None]], metric: Metric, largest: float) -> Any:
    """Draw differences as a map with their values: blue is better, hatched where the interval holds zero.

    Args:
        axes: Matplotlib's axes.
        grid: The differences by row and column; None where there is none.
        metric: What was measured.
        largest: The difference with the strongest color, in the metric's unit.

    Returns:
        The image, for a color bar.
    """
    from matplotlib.patches import Rectangle

    scale = metric.scale
    values = [[float("nan") if cell is None else scale * (cell.mean or 0.0) for cell in row] for row in grid]
    colors = "RdBu" if metric.higher_is_better else "RdBu_r"  # blue is better
    image = axes.imshow(values, cmap=colors, vmin=-largest or -1, vmax=largest or 1, aspect="auto")
    for down, row in enumerate(grid):
        for across, cell in enumerate(row):
            if cell is None:
                continue
            ink = "white" if abs(values[down][across]) > 0.6 * largest else INK  # seen on the color of the cell
            if cell.low is None or cell.high is None or cell.low <= 0 <= cell.high:
                hatched = Rectangle((across - 0.5, down - 0.5), 1, 1, fill=False, linewidth=0, edgecolor=ink, alpha=0.4)
                hatched.set_hatch("////")
                axes.add_patch(hatched)
            text = axes.text(
                across, down, metric.text(cell.mean, "+"), ha="center", va="center", fontsize=8.5, color=ink
            )  # fmt: skip
            text.set_bbox({"facecolor": image.cmap(image.norm(values[down][across])), "linewidth": 0, "pad": 1.5})
    return image
