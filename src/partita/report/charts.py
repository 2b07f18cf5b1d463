"""Charts as data: lines with their spread, and dots by client. The page's script draws them, and `draw.py` for paper.

A chart has views, of which the reader chooses one, such as one for each metric. A view has lines, each of a label. All
views share the choice of the axis across: rounds, megabytes or seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partita.record.metric import short
from partita.report.elements import Table

MAX_POINTS = 150_000  # of all lines of a chart; lines of long runs are thinned
POINTS_KEPT = (60, 600)  # of one line, at least and at most
TABLE_ROWS = 12


@dataclass(frozen=True)
class Line:
    """One line of a view. All lists have the same length."""

    label: str | None  # None: a line for reference, without a label
    x: Sequence[Sequence[float] | None]  # for each axis across; None if it is not known
    y: Sequence[float | None]
    sd: Sequence[float | None] | None = None  # standard deviation; None if there is none


@dataclass(frozen=True)
class View:
    """What a chart shows at one time."""

    name: str  # in the list of views
    title: str  # of the axis
    lines: Sequence[Line]
    marks: Sequence[tuple[float, str]] = ()  # (round, label) of vertical lines
    names: Sequence[str] = ()  # names of x = 0, 1, …, instead of numbers
    log: tuple[bool, bool] = (False, False)  # whether the axes (across, up) are logarithmic at first
    limits: tuple[float, float] | None = None  # least and greatest possible value; bands and the axis end there


@dataclass(frozen=True)
class Axis:
    """An axis across that the reader can choose."""

    name: str  # in the list of axes
    title: str
    whole: bool = False  # whether values are whole numbers


ROUNDS = Axis("rounds", "rounds completed", whole=True)
MEGABYTES = Axis("bytes", "MB sent up so far, all clients")
SECONDS = Axis("seconds", "seconds of training so far")


@dataclass(frozen=True)
class Chart:
    """A chart for the page's script and for paper, with a text and a table for readers without it."""

    name: str  # id of the element
    title: str  # heading
    caption: str  # explanation below the chart
    summary: str  # what the chart shows, for screen readers
    table: Table | None  # the most important values
    views: Sequence[View]  # those with lines
    axes: Sequence[Axis]
    points: bool  # dots instead of lines
    content: Mapping[str, Any]  # values for the script; see assets/report.js


def chart(
    name: str,
    title: str,
    caption: str,
    views: Sequence[View],
    labels: Sequence[str],
    axes: Sequence[Axis] = (ROUNDS,),
    points: bool = False,
) -> Chart | None:
    """Return a chart; None if it has no lines.

    Args:
        name: Id of the element.
        title: Heading of the chart.
        caption: Explanation below it.
        views: The views. The first is shown at first.
        labels: All labels of the report, in order.
        axes: The axes across. The first is shown at first.
        points: Draw dots instead of lines. The section then has a table of all values, so the chart has none.
    """
    views = [view for view in views if view.lines]
    if not views:
        return None
    table = None if points else _table(views[0], title, axes[0])
    content = _content(views, labels, axes, points)
    return Chart(name, title, caption, _summary(views[0]), table, views, axes, points, content)


def _content(views: Sequence[View], labels: Sequence[str], axes: Sequence[Axis], points: bool) -> dict[str, Any]:
    """Return the values for the script. Equal lists of x are written once."""
    pool: dict[tuple[float, ...], int] = {}
    place = {label: index for index, label in enumerate(labels)}
    most = MAX_POINTS // sum(len(view.lines) for view in views)
    most = min(max(most, POINTS_KEPT[0]), POINTS_KEPT[1])

    def line_of(line: Line) -> dict[str, Any]:
        kept = list(range(len(line.y))) if points else thinned(len(line.y), most)
        across = [
            None if values is None else pool.setdefault(tuple(values[index] for index in kept), len(pool))
            for values in line.x
        ]
        shown: dict[str, Any] = {"x": across, "y": [line.y[index] for index in kept]}
        if line.label is not None:
            shown["label"] = place[line.label]
        if line.sd is not None and any(line.sd):
            shown["sd"] = [line.sd[index] for index in kept]
        return shown

    shown = [
        {
            "name": view.name,
            "title": view.title,
            "log": view.log,
            "limits": view.limits,
            "lines": [line_of(line) for line in view.lines],
            "marks": [[round, place[label]] for round, label in view.marks],
            "names": view.names,
        }
        for view in views
    ]
    # An axis is offered only if every line has values on it.
    known = [
        place for place in range(len(axes)) if all(line.x[place] is not None for view in views for line in view.lines)
    ]
    return {
        "points": points,
        "axes": [
            {"at": place, "name": axes[place].name, "title": axes[place].title, "whole": axes[place].whole}
            for place in known
        ],
        "views": shown,
        "x": list(pool),
    }


def thinned(count: int, most: int) -> list[int]:
    """Return at most `most` of the places 0, 1, … `count` - 1, evenly spaced, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})


def _summary(view: View) -> str:
    """Say where each line ends."""
    ends = []
    for line in view.lines:
        known = [place for place, value in enumerate(line.y) if value is not None]
        if known and line.label is not None:
            first, last = (f"{_value(line, place)}" for place in (known[0], known[-1]))
            ends.append(f"{line.label} from {first} to {last}")
    return f"{view.title}: {'; '.join(ends)}."


def _value(line: Line, place: int) -> str:
    value, sd = line.y[place], line.sd[place] if line.sd else None
    return short(value) if value is None or not sd else f"{short(value)} ± {short(sd)}"


def _table(view: View, title: str, axis: Axis) -> Table | None:
    """Return some values of a view: a row for each of a few places on the axis, a column for each line."""
    lines = [line for line in view.lines if line.label is not None and line.x[0] is not None]
    across = sorted({value for line in lines for value in line.x[0] or ()})
    if not across:
        return None
    across = [across[place] for place in thinned(len(across), TABLE_ROWS)]
    known = [{value: place for place, value in enumerate(line.x[0] or ())} for line in lines]
    rows = []
    for value in across:
        cells = (_value(line, at[value]) if value in at else "" for line, at in zip(lines, known, strict=True))
        rows.append((f"{value:g}", *cells))
    headings = (axis.name, *(str(line.label) for line in lines))
    return Table(f"{title}: {view.title}", headings, rows, kind="numbers", labels=True)
