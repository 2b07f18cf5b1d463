"""Charts and pictures of the page drawn for paper, with matplotlib. What they show is computed elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.report import chart_data, layer_selection, plan, split
from partita.report.charts import MEGABYTES, ROUNDS, Axis, Chart, Line, View
from partita.report.load import ReportError, RunRecord, by_label, by_number, metric_of
from partita.report.plot_style import (
    COLORS,
    INK,
    MUTED,
    Style,
    legend,
    legend_height,
    new_figure,
    shorten,
    style_axes,
    styles,
    whole_rounds,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, PANELS_ACROSS = 9.2, 4
REFERENCE = Style(MUTED, (0, (3, 3)))  # of a line without a label


def chart_figure(
    chart: Chart | None, records: Sequence[RunRecord], axis: Axis | None = None, only: str | None = None
) -> Figure | None:
    """Draw a chart.

    Args:
        chart: The chart.
        records: The runs of the report.
        axis: The axis across. Default: the chart's first.
        only: The name of the view to draw. Default: a panel for each view.

    Returns:
        The figure; None if there is nothing to draw.
    """
    axis = axis or (chart.axes[0] if chart else ROUNDS)
    place = chart.axes.index(axis) if chart else 0
    views = [
        view
        for view in (chart.views if chart else ())
        if only in (None, view.name) and any(line.x[place] is not None for line in view.lines)
    ]
    if chart is None or not views:
        return None
    labels, single = list(by_label(records)), len(views) == 1
    across = min(PANELS_ACROSS, len(views))
    down = math.ceil(len(views) / across)
    figure = new_figure(WIDTH, (3.8 if single else 0.4 + 1.95 * down) + legend_height(labels))
    panels = list(figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flat)
    for panel in panels[len(views) :]:
        panel.set_visible(False)
    marked = [
        _draw_view(panel, view, axis, place, styles(labels), chart.points)
        for view, panel in zip(views, panels, strict=False)
    ]
    same_title = len({view.title for view in views}) == 1
    for number, (view, panel) in enumerate(zip(views, panels, strict=False)):
        below = number + across >= len(views)
        panel.tick_params(labelbottom=below)
        panel.set_xlabel(panel.get_xlabel() if below else "")
        panel.set_ylabel("" if number % across else panel.get_ylabel() if same_title else chart.title.lower())
        if not single:
            panel.set_title(shorten(view.name, 28), loc="left", fontsize=9, color=INK, fontweight="bold")
    legend(figure, labels, any(marked))
    return figure


def _draw_view(
    panel: Axes, view: View, axis: Axis, place: int, label_styles: Mapping[str, Style], points: bool = False
) -> bool:
    """Draw the lines of a view. Return whether changes of the plan were marked."""
    known = [(line, line.x[place] or ()) for line in view.lines if line.x[place] is not None]
    band = any(any(line.sd or ()) for line, _ in known)
    for line, x in known:
        style = REFERENCE if line.label is None else label_styles[line.label]
        (_draw_dots if points else _draw_line)(panel, x, line, view, style, len(known))
        if axis is MEGABYTES:
            panel.plot(x[-1:], _numbers(line.y[-1:]), "o", color=style.color, markersize=5, zorder=4)
    spread = "" if not band else "  (bar: ±1 sd over seeds)" if points else "  (band: ±1 sd over seeds)"
    style_axes(panel, axis.title, f"{view.title}{spread}")
    if view.names:
        named = len(view.names) <= split.NAMED
        panel.set_xticks(
            range(len(view.names)) if named else [],
            [shorten(name, 16) for name in view.names] if named else [],
            rotation=90,
        )
    elif axis.whole:
        whole_rounds(panel)
    for log, set_scale in zip(view.log, (panel.set_xscale, panel.set_yscale), strict=True):
        if log:
            set_scale("log")
    ends, starts = [x[-1] for _, x in known], [x[0] for _, x in known]
    if axis is MEGABYTES and min(starts) > 0 and max(ends) > 8 * min(ends):
        panel.set_xscale("log")  # on a linear scale a cheap method would be squeezed to the left edge
    return axis is ROUNDS and _mark(panel, view.marks, label_styles)


def _draw_line(panel: Axes, x: Sequence[float], line: Line, view: View, style: Style, count: int) -> None:
    width, alpha = (1.8, 0.16) if count <= 6 else (1.4, 0.07)
    marker = "o" if len(x) < 3 and line.label is not None else None  # a very short line would be invisible
    look: dict[str, Any] = {"color": style.color, "linestyle": style.dash, "linewidth": width}
    panel.plot(x, _numbers(line.y), marker=marker, markersize=4, zorder=3, **look)
    if line.sd and any(line.sd):
        least, most = view.limits or (-math.inf, math.inf)
        both = list(zip(_numbers(line.y), _numbers(line.sd), strict=True))
        low, high = [max(least, value - sd) for value, sd in both], [min(most, value + sd) for value, sd in both]
        panel.fill_between(x, low, high, color=style.color, alpha=alpha, linewidth=0, zorder=2)


def _draw_dots(panel: Axes, x: Sequence[float], line: Line, view: View, style: Style, count: int) -> None:
    spread = _numbers(line.sd) if line.sd and any(line.sd) else None
    panel.errorbar(x, _numbers(line.y), spread, fmt="o", color=style.color, markersize=3.6, alpha=0.7, linewidth=1)


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _mark(panel: Axes, marks: Sequence[tuple[float, str]], label_styles: Mapping[str, Style]) -> bool:
    """Draw a vertical line between the last round of a stage and the first of the next."""
    by_round: dict[float, list[str]] = {}
    for at, label in marks:
        by_round.setdefault(at, []).append(label)
    for at, labels in by_round.items():
        for place, label in enumerate(labels):
            # Labels that change at the same round alternate along the line, so that each is visible.
            dash = (-6 * place, (6, 6 * (len(labels) - 1))) if len(labels) > 1 else (0, (3, 3))
            panel.axvline(at, color=label_styles[label].color, linestyle=dash, linewidth=1.2, alpha=0.9, zorder=1)
    return bool(marks)


@dataclass(frozen=True)
class Grid:
    """A picture of colored cells, with bars above if there are any."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[tuple[str, float, str]]]  # (row, column): color, opacity and text
    below: str  # title of the axis across
    bars: Sequence[int] = ()

    @property
    def height(self) -> float:
        """Inches of the picture."""
        return (1.5 if self.bars else 0.9) + (min(4.5, 0.4 + 0.17 * len(self.rows)) if self.rows else 0.0)


def grid_figure(grids: Sequence[Grid], key: Sequence[tuple[str, str]] = ()) -> Figure | None:
    """Draw pictures one below the other; None if there are none.

    Args:
        grids: The pictures.
        key: Color and meaning of cells, for a legend.
    """
    if not grids:
        return None
    from matplotlib.patches import Patch

    heights = [grid.height for grid in grids]
    figure = new_figure(WIDTH, sum(heights) + (0.4 if key else 0))
    parts = figure.subfigures(len(grids), 1, squeeze=False, height_ratios=heights).flat
    for number, (part, grid) in enumerate(zip(parts, grids, strict=True)):
        shown = [name for name in ("bars", "rows") if getattr(grid, name)]
        panels = list(part.subplots(len(shown), 1, sharex=True, squeeze=False).flat)
        for name, panel in zip(shown, panels, strict=True):
            (_draw_bars if name == "bars" else _draw_cells)(panel, grid)
        panels[0].set_title(shorten(grid.title, 100), loc="left", fontsize=9, color=INK)
        named = len(grid.columns) <= split.NAMED
        panels[-1].set_xticks(
            range(len(grid.columns)) if named else [],
            [shorten(name, 16) for name in grid.columns] if named else [],
            rotation=90 if max(map(len, grid.columns)) > 5 else 0,
        )
        panels[-1].set_xlabel(grid.below, fontsize=9, color=INK)
        if key and not number:
            patches = [Patch(facecolor=color, label=meaning) for color, meaning in key]
            part.legend(handles=patches, loc="outside upper left", ncols=4, frameon=False, fontsize=8, labelcolor=INK)
    return figure


def _draw_bars(panel: Axes, grid: Grid) -> None:
    panel.bar(range(len(grid.bars)), grid.bars, width=0.8, color=COLORS[0])
    style_axes(panel, "", "training\nexamples")
    panel.set_xlim(-0.6, len(grid.bars) - 0.4)


def _draw_cells(panel: Axes, grid: Grid) -> None:
    from matplotlib.colors import to_rgba

    colors = [[to_rgba(color, opacity) for color, opacity, _ in row] for row in grid.cells]
    panel.imshow(colors, aspect="auto", interpolation="none")
    style_axes(panel, "", "")
    panel.grid(False)
    panel.spines[:].set_visible(False)
    if max(len(grid.rows), len(grid.columns)) <= split.NAMED:  # gaps between cells
        panel.set_xticks([place - 0.5 for place in range(1, len(grid.columns))], minor=True)
        panel.set_yticks([place - 0.5 for place in range(1, len(grid.rows))], minor=True)
        panel.grid(which="minor", color="white", linewidth=1.5)
        panel.tick_params(which="minor", length=0)
    for row, cells in enumerate(grid.cells):
        for column, (_, _, text) in enumerate(cells):
            if text:
                panel.text(column, row, text, ha="center", va="center", fontsize=7, color="white")
    named = len(grid.rows) <= split.NAMED
    names = [shorten(name, 24) for name in grid.rows] if named else []
    panel.set_yticks(range(len(names)), names, fontsize=7.5)
    if not named:
        panel.set_ylabel(f"{len(grid.rows)} rows", fontsize=9, color=INK)


def _plans(records: Sequence[RunRecord]) -> Figure | None:
    pictures = [plan.plan_picture(each) for each in plan.plans(records)]
    used = {cell.status for picture in pictures for _, cells in picture.rows for cell in cells}
    grids = [
        Grid(
            picture.title,
            [name for name, _ in picture.rows],
            picture.columns,
            [[(plan.COLOR[cell.status], 1.0, cell.share) for cell in cells] for _, cells in picture.rows],
            "rounds",
        )
        for picture in pictures
    ]
    return grid_figure(grids, [(plan.COLOR[name], plan.STATUSES[name][1]) for name in plan.STATUSES if name in used])


def _layers(records: Sequence[RunRecord]) -> Figure | None:
    pictures = layer_selection.pictures(records)
    return grid_figure(
        [
            Grid(
                picture.title,
                picture.rows,
                [column.removeprefix("round ") for column in picture.columns],
                [[(COLORS[0], share or 0.0, "") for share in row] for row in picture.shares],
                "rounds completed",
            )
            for picture in pictures
        ]
    )


def split_figure(splits: Sequence[split.Split]) -> Figure | None:
    """Draw what clients hold: bars of training examples above a heat map of the classes they belong to.

    Args:
        splits: The splits; a panel for each of the first ones.
    """
    grids = []
    for each in splits[: split.PANELS]:
        counts = [[client["labels"][kind] for client in each.clients] for kind in range(len(each.classes))]
        largest = max(map(max, counts), default=1) or 1
        listed, every = len(each.clients), f"{each.population:,}".replace(",", " ")
        grids.append(
            Grid(
                each.title(len(splits) == 1),
                each.classes[: split.MAX_CLASSES],
                [client["name"] for client in each.clients],
                [[(COLORS[0], count / largest, "") for count in row] for row in counts[: split.MAX_CLASSES]],
                f"client (the first {listed} of {every})" if each.population > listed else "client",
                [client["train"] for client in each.clients],
            )
        )
    return grid_figure(grids)


Draw = Callable[[Sequence[RunRecord], Any], "Figure | None"]


def _clients(view: str) -> Draw:
    return lambda records, metric: chart_figure(
        chart_data.clients_chart(records, metric, by_number), records, only=view
    )


def _scores(axis: Axis) -> Draw:
    """Draw the test metric over rounds or bytes."""
    return lambda records, metric: chart_figure(
        chart_data.curves_chart(records, metric), records, axis, f"test {metric.name}"
    )


FIGURES: Mapping[str, Draw] = {
    "rounds": _scores(ROUNDS),
    "bytes": _scores(MEGABYTES),
    "drift": lambda records, metric: chart_figure(chart_data.drift_chart(records), records),
    "personal": _clients("worst to best"),
    "gain": _clients("gain, lowest to highest"),
    "split": lambda records, metric: split_figure(split.splits(records)),
    "layers": lambda records, metric: _layers(records),
    "epsilon": lambda records, metric: chart_figure(chart_data.epsilon_chart(records), records),
    "attacks": lambda records, metric: chart_figure(chart_data.attacks_chart(records), records),
    "plan": lambda records, metric: _plans(records),
}


def figures(records: Sequence[RunRecord], folder: Path | str, metric: str | None = None) -> list[Path]:
    """Write each figure that the runs have values for, as SVG and PDF: the same bytes for the same runs.

    Args:
        records: The runs.
        folder: Where to write; it is created. Files of the same names are replaced.
        metric: Metric to draw. Default: the runs' own.

    Returns:
        The files written.

    Raises:
        ReportError: If matplotlib is not installed, or the runs have different metrics.
    """
    chosen, folder = metric_of(records, metric), Path(folder)
    drawn = {file: figure for file, draw in FIGURES.items() if (figure := draw(records, chosen)) is not None}
    folder.mkdir(parents=True, exist_ok=True)
    return [path for file, figure in drawn.items() for path in _save(figure, folder / file)]


def _save(figure: Figure, stem: Path) -> list[Path]:
    from matplotlib import rc_context

    paths = [stem.with_suffix(".svg"), stem.with_suffix(".pdf")]
    # Without these, a file holds random ids and the time. Text stays text, which a paper's editor can change.
    with rc_context({"svg.hashsalt": stem.name, "svg.fonttype": "none", "pdf.fonttype": 42}):
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], metadata={"CreationDate": None})
    return paths


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
    chosen, labels = metric_of(records, metric), list(by_label(records))
    chart = chart_data.curves_chart(records, chosen)
    view = next((view for view in (chart.views if chart else ()) if view.name == f"test {chosen.name}"), None)
    if view is None:
        raise ReportError(
            f"no run was ever tested for '{chosen.name}', so there is nothing to draw; choose a recorded metric"
        )
    figure = new_figure(11.5, 3.9 + legend_height(labels))
    panels = figure.subplots(1, 2, sharey=True)
    known = [any(line.x[place] is not None for line in view.lines) for place in (0, 1)]
    titles = ("By round", "By megabytes sent up")
    marked = False
    for place, (axis, title) in enumerate(zip((ROUNDS, MEGABYTES), titles, strict=True)):
        if known[place]:
            marked |= _draw_view(panels[place], view, axis, place, styles(labels))
        panels[place].set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold")
    panels[1].set_ylabel("")
    legend(figure, labels, marked)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png", dpi=180, facecolor="white")
    return out
