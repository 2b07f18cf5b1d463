"""What clients hold: numbers of examples and of labels, as a figure and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from partita.report.load import RunRecord, by_label
from partita.report.plot_style import COLORS, INK, MUTED, new_figure, shorten, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_CLIENTS = 1000  # clients that are drawn
MAX_CLASSES = 100  # classes that are drawn
NAMED = 40  # axes with more clients or classes than this show no names
PANELS = 4
LABELS_LISTED = 12  # label counts of a client in the table


@dataclass(frozen=True)
class Split:
    """Labels with the same split, and what its clients hold."""

    labels: list[str]
    seed: int
    population: int
    classes: Sequence[str]
    clients: Sequence[Mapping[str, Any]]  # at most MAX_CLIENTS

    def title(self, only: bool) -> str:
        """Name the runs with this split. If it is the only one, its labels need no names."""
        return f"seed {self.seed}" if only else f"{', '.join(self.labels)}, seed {self.seed}"


def splits(records: Sequence[RunRecord]) -> list[Split]:
    """Return the splits of each label's first seed that recorded one. Labels with equal splits are grouped."""
    grouped: dict[str, Split] = {}
    for label, runs in by_label(records).items():
        run = next((run for run in runs if run.split.get("clients")), None)
        if run is not None:
            found = Split(
                [], run.seed, run.split["population"], run.split.get("classes", ()), run.split["clients"][:MAX_CLIENTS]
            )
            grouped.setdefault(json.dumps(run.split), found).labels.append(label)
    return list(grouped.values())


def split_grid(records: Sequence[RunRecord]) -> Figure | None:
    """Draw a panel per split: bars of training examples by client, above a heat map of the classes they belong to."""
    every = splits(records)
    return split_grid_of(every[:PANELS], len(every) == 1) if every else None


def split_grid_of(shown: Sequence[Split], only: bool) -> Figure:
    """Draw a panel per split; `only`: whether there are no others, so that they need no names."""
    heights = [_grid_height(split) for split in shown]
    figure = new_figure(9.2, sum(1.5 + height for height in heights))
    for part, split in zip(
        figure.subfigures(len(shown), 1, squeeze=False, height_ratios=[1.5 + height for height in heights]).flat,
        shown,
        strict=True,
    ):
        if split.classes:
            bars, grid = part.subplots(2, 1, sharex=True, height_ratios=[1.1, _grid_height(split)])
            _draw_labels(grid, split)
        else:
            bars = part.subplots(1, 1)
        _draw_sizes(bars, split, split.title(only))
        bars.tick_params(labelbottom=not split.classes)
        bottom = grid if split.classes else bars
        count = len(split.clients)
        named = count <= NAMED
        bottom.set_xticks(
            range(count) if named else [],
            [shorten(client["name"], 16) for client in split.clients] if named else [],
            rotation=90 if named and max(len(client["name"]) for client in split.clients) > 3 else 0,
        )
        more = f" (the first {count} of {split.population:,})".replace(",", " ") if split.population > count else ""
        bottom.set_xlabel(f"client{more}", fontsize=9, color=INK)
    return figure


def _grid_height(split: Split) -> float:
    classes = min(len(split.classes), MAX_CLASSES)
    return min(4.5, 0.4 + 0.17 * classes) if classes else 0.0


def _draw_sizes(axes: Axes, split: Split, title: str) -> None:
    sizes = [client["train"] for client in split.clients]
    axes.bar(range(len(sizes)), sizes, width=0.8, color=COLORS[0])
    style_axes(axes, "", "training\nexamples")
    axes.set_xlim(-0.6, len(sizes) - 0.4)
    axes.set_title(shorten(title, 100), loc="left", fontsize=9, color=INK)


def _draw_labels(axes: Axes, split: Split) -> None:
    from matplotlib.ticker import MaxNLocator

    classes = split.classes[:MAX_CLASSES]
    counts = [[client["labels"][place] for client in split.clients] for place in range(len(classes))]  # (class, client)
    image = axes.imshow(counts, aspect="auto", cmap="Blues", interpolation="none", vmin=0)
    style_axes(axes, "", "")
    axes.grid(False)
    axes.spines[:].set_color(MUTED)
    named = len(classes) <= NAMED
    axes.set_yticks(
        range(len(classes)) if named else [], [shorten(name, 20) for name in classes] if named else [], fontsize=7.5
    )
    if not named:
        axes.set_ylabel(f"{len(classes)} classes", fontsize=9, color=INK)
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01, ticks=MaxNLocator(nbins=5, integer=True))
    bar.ax.tick_params(labelsize=7.5, colors=INK)


def split_rows(split: Split) -> list[tuple[str, ...]]:
    """Return a table row for each client: name, sizes and its most frequent labels."""
    return [
        (
            client["name"],
            *(f"{client[part]:,}".replace(",", " ") for part in ("train", "validation", "test")),
            *([frequent(client["labels"], split.classes)] if split.classes else []),
        )
        for client in split.clients
    ]


def frequent(counts: Sequence[int], classes: Sequence[str]) -> str:
    """List the most frequent classes with their counts."""
    order = sorted((place for place, count in enumerate(counts) if count), key=lambda place: -counts[place])
    named = [f"{classes[place]} ({counts[place]})" for place in order[:LABELS_LISTED]]
    return ", ".join([*named, f"and {len(order) - LABELS_LISTED} more"] if len(order) > LABELS_LISTED else named)
