"""Shared plot style: colors, axes, and a legend outside the data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from partita.report.load import ReportError
from partita.storage.safe_text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#24292f", "#6e7781", "#d8dee4"
# Okabe and Ito's palette, which color-blind readers can distinguish. Without yellow and black, which vanish on a page.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d46")
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (4, 1.5, 1, 1.5)))
UNUSED_COLOR = "#e6e9ed"
ROLES = ("embedding", "query", "key", "value", "output", "mlp", "norm", "head")


@dataclass(frozen=True)
class Style:
    """Color and dash pattern of a label."""

    color: str  # as matplotlib and CSS write it
    dash: Any  # matplotlib's line style


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """Return a style for each label, the same in every figure. When colors run out, dashes distinguish labels."""
    return {
        label: Style(COLORS[place % len(COLORS)], DASHES[place // len(COLORS) % len(DASHES)])
        for place, label in enumerate(labels)
    }


def new_figure(width: float, height: float) -> Figure:
    """Create a figure without pyplot's global state. `width` and `height` are in inches.

    Raises:
        ReportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ReportError("figures need matplotlib; pip install 'partita[report]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def style_axes(axes: Axes, across: str, up: str) -> None:
    """Remove the box, draw a light grid behind the data, and label the axes with the texts `across` and `up`."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=INK, labelsize=8.5, width=0.8, length=3)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(across, fontsize=9, color=INK)
    axes.set_ylabel(up, fontsize=9, color=INK)


def whole_rounds(axes: Axes) -> None:
    """Use integer ticks on the x axis."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def _legend_columns(names: Sequence[str]) -> int:
    """Return the largest number of columns that fits. Matplotlib fills columns top to bottom."""
    for columns in range(len(names), 1, -1):
        rows = math.ceil(len(names) / columns)
        widths = [max(map(len, names[start : start + rows])) + 8 for start in range(0, len(names), rows)]
        if sum(widths) <= 116:
            return columns
    return 1


def legend_height(labels: Sequence[str]) -> float:
    """Return the height of the legend in inches."""
    names = [shorten(label, 28) for label in labels]
    return 0.25 + 0.19 * math.ceil(len(names) / _legend_columns(names))


def legend(figure: Figure, labels: Sequence[str], marked: bool = False) -> None:
    """Draw the legend of `labels` above the axes. `marked` adds an entry for plan changes."""
    from matplotlib.lines import Line2D

    handles = [
        # The leading space is needed because matplotlib before 3.10 hides labels that start with an underscore.
        Line2D([], [], color=style.color, linestyle=style.dash, linewidth=2, label=" " + shorten(label, 28))
        for label, style in styles(labels).items()
    ]
    if marked:
        handles.append(Line2D([], [], color=MUTED, linestyle=(0, (3, 3)), linewidth=1.2, label=" plan changes"))
    figure.legend(
        handles=handles, loc="outside upper left", ncols=_legend_columns([str(line.get_label()) for line in handles]),
        frameon=False, fontsize=8.5, labelcolor=INK, handlelength=2.4, handletextpad=0.4, columnspacing=1.6,
    )  # fmt: skip


def shorten(text: str, length: int) -> str:
    """Truncate text to `length` characters and escape dollar signs, which start math mode in matplotlib."""
    text = printable(text)
    return (text if len(text) <= length else text[: length - 1] + "…").replace("$", r"\$")
