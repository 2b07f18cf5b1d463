"""What clients hold: numbers of examples and of labels and how uneven they are, as a picture, a table and JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from partita.record import forms
from partita.report.elements import Table
from partita.report.load import ReportError, RunRecord, by_label
from partita.storage.png import data_uri, encode_png
from partita.storage.safe_text import printable

MAX_CLIENTS = 1000  # clients that are drawn
MAX_CLASSES = 100  # classes that are drawn
NAMED = 40  # axes with more clients or classes than this show no names
PANELS = 4
LABELS_LISTED = 12  # label counts of a client in the table
LEFT, ACROSS, TOP, BARS = 150, 800, 14, 90  # margins, width of the picture and height of its bars, in its units
NUMBERED = 24  # cells show their counts up to this many clients and classes
COLOR = (0, 114, 178)  # blue of the Okabe–Ito palette
STRONGEST = 0.72  # opacity of the largest count, on which text stays readable
NAME_LENGTH = 20
CLASSES_SHOWN = 4  # most frequent classes of a client in the terminal
BAR_WIDTH = 14
FORMATS = (".html", ".png", ".svg")


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


def client_table(split: Split, caption: str) -> Table:
    """Return a table with a row for each client: name, sizes and its most frequent labels."""
    headings = ("client", "train", "validation", "test", *(["labels in train"] if split.classes else []))
    rows = [
        (
            client["name"],
            *(f"{client[part]:,}".replace(",", " ") for part in ("train", "validation", "test")),
            *([frequent(client["labels"], split.classes)] if split.classes else []),
        )
        for client in split.clients
    ]
    return Table(caption, headings, rows)


def frequent(counts: Sequence[int], classes: Sequence[str]) -> str:
    """List the most frequent classes with their counts."""
    order = sorted((place for place, count in enumerate(counts) if count), key=lambda place: -counts[place])
    named = [f"{classes[place]} ({counts[place]})" for place in order[:LABELS_LISTED]]
    return ", ".join([*named, f"and {len(order) - LABELS_LISTED} more"] if len(order) > LABELS_LISTED else named)


def picture(split: Split) -> Mapping[str, Any]:
    """Return a drawing of bars of training examples above a heat map of classes, for `templates/split_svg.html.j2`."""
    count, classes = len(split.clients), len(split.classes)
    column = ACROSS / count
    row = max(4.0, min(22.0, 480 / classes)) if classes else 0.0
    sizes = [client["train"] for client in split.clients]
    largest = max(max(sizes), 1)
    bars = "".join(
        f"M{_short(LEFT + place * column)} {TOP + BARS}v-{_short(BARS * size / largest)}"
        f"h{_short(0.86 * column)}v{_short(BARS * size / largest)}z"
        for place, size in enumerate(sizes)
    )
    labels = [client.get("labels", ()) for client in split.clients]
    top = TOP + BARS + 8
    bottom = top + row * classes
    named = count <= NAMED
    long = named and max(len(client["name"]) for client in split.clients) * 7 > column
    cells = [
        {"x": LEFT + (place + 0.5) * column, "y": top + (kind + 0.5) * row, "text": value}
        for place, own in enumerate(labels)
        for kind, value in enumerate(own)
        if value and classes <= NUMBERED and count <= NUMBERED
    ]
    return {
        "width": LEFT + ACROSS + 10,
        "height": bottom + (30 if not named else 90 if long else 30),
        "bars": bars,
        "largest": largest,
        "bar_top": TOP,
        "bar_bottom": TOP + BARS,
        "left": LEFT,
        "across": ACROSS,
        "top": top,
        "grid_height": row * classes,
        "image": _heat(labels, classes) if classes else None,
        "cells": cells,
        "classes": [
            {"y": top + (kind + 0.5) * row, "name": _cut(name)}
            for kind, name in enumerate(split.classes if classes <= NAMED else ())
        ],
        "class_count": classes,
        "clients": [
            {"x": LEFT + (place + 0.43) * column, "name": _cut(client["name"])}
            for place, client in enumerate(split.clients if named else ())
        ],
        "turned": long,
        "bottom": bottom + 16,
        "client_count": count,
        "population": split.population,
        "summary": summary(split),
    }


def summary(split: Split) -> str:
    """Say in words what the picture shows."""
    found = skew(split)
    text = (
        f"{len(split.clients)} of {split.population} clients with {found.smallest} to {found.largest} training examples"
        f" (median {found.median:g})"
    )
    if found.mean_distance is None or found.entropy is None or found.mean_entropy is None:
        return f"{text}."
    return (
        f"{text} of {len(split.classes)} classes. Label entropy is {found.mean_entropy:.2f} bits at an average client "
        f"and {found.entropy:.2f} bits over all clients; the mean total variation distance of a client's classes from "
        f"those of all is {found.mean_distance:.2f} (0: the same, 1: no class in common)."
    )


def _heat(labels: Sequence[Sequence[int]], classes: int) -> str:
    """Return an image with a pixel for each client and class: the more examples, the less transparent."""
    largest = max((count for own in labels for count in own), default=0) or 1
    pixels = bytearray()
    for kind in range(classes):
        for own in labels:
            share = own[kind] / largest
            # Even one example is seen.
            opacity = round(255 * STRONGEST * (0.06 + 0.94 * share)) if share else 0
            pixels += bytes((*COLOR, opacity))
    return data_uri(encode_png(bytes(pixels), len(labels), classes, 4))


def _short(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _cut(name: str) -> str:
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…"


def read_split(held: Mapping[str, Any], seed: int) -> Split:
    """Return a split from its record."""
    checked = forms.split(held, "the split")
    return Split([], seed, checked["population"], checked.get("classes", ()), checked["clients"])


def to_json(split: Split) -> dict[str, Any]:
    """Return the split and its skew for JSON."""
    found = asdict(skew(split))
    clients = [
        {**client, **{key: own[key] for key in ("entropy", "distance")}}
        for client, own in zip(split.clients, found.pop("clients"), strict=True)
    ]
    return {
        "seed": split.seed,
        "population": split.population,
        "classes": list(split.classes),
        "clients": clients,
        "skew": found,
    }


def to_text(split: Split, width: int = 110, most: int = 60) -> str:
    """Return a table for the terminal: sizes with bars, classes and skew of each client.

    Args:
        split: The split.
        width: Characters of a line.
        most: Clients that are listed.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    found = skew(split)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("client", overflow="fold")
    for heading in ("train", "", "validation", "test", *(["classes", "entropy", "distance"] if split.classes else [])):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    if split.classes:
        table.add_column("most frequent classes", overflow="fold")
    for client, own in list(zip(split.clients, found.clients, strict=True))[:most]:
        table.add_row(*(Text(printable(cell)) for cell in _cells(client, own, found, split.classes)))
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(table)
        console.print(Text(summary(split)))
        if (left := split.population - min(most, len(split.clients))) > 0:
            console.print(Text(f"{left} more clients are not listed; --json lists those that are counted."))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _cells(client: Mapping[str, Any], own: ClientSkew, found: Skew, classes: Sequence[str]) -> list[str]:
    bar = "█" * max(1, round(BAR_WIDTH * own.train / max(found.largest, 1))) if own.train else ""
    cells = [client["name"], str(own.train), bar, str(client["validation"]), str(client["test"])]
    if not classes:
        return cells
    order = sorted(range(len(classes)), key=lambda kind: -client["labels"][kind])
    told = [f"{_cut(classes[kind])}: {client['labels'][kind]}" for kind in order if client["labels"][kind]]
    more = f" and {len(told) - CLASSES_SHOWN} more" if len(told) > CLASSES_SHOWN else ""
    figures = ["–" if value is None else f"{value:.2f}" for value in (own.entropy, own.distance)]
    return [*cells, str(own.classes), *figures, ", ".join(told[:CLASSES_SHOWN]) + more]


def check_file(out: Path) -> None:
    """Raise a ReportError if a picture cannot be written to a file of this name, before anything is read."""
    if out.suffix.lower() not in FORMATS:
        raise ReportError(f"--out is '{out}'; its name must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if out.suffix.lower() == ".png":
        from importlib.util import find_spec

        if find_spec("matplotlib") is None:
            raise ReportError(
                "a picture as PNG needs matplotlib; install it with: pip install 'partita[report]', or write an SVG"
            )


def write_picture(split: Split, out: Path, title: str) -> None:
    """Write the picture as an SVG image, or as an HTML page with the table of clients."""
    from partita.report.templating import render

    if out.suffix.lower() == ".svg":
        text = render("split_svg", picture=picture(split), title=title, standalone=True)
    else:
        table = client_table(split, "Clients' examples")
        text = render("split_page", title=title, picture=picture(split), table=table, styles={}, standalone=False)
    out.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class ClientSkew:
    """What one client holds, compared with all clients together. None: the task has no classes, or it has no labels."""

    name: str
    train: int
    classes: int | None  # classes of which it has an example
    entropy: float | None  # of its classes, in bits
    distance: float | None  # total variation distance of its classes from those of all clients, 0 to 1


@dataclass(frozen=True)
class Skew:
    """The skew of a split, over the clients that are listed."""

    clients: Sequence[ClientSkew]
    smallest: int  # training examples
    median: float
    largest: int
    entropy: float | None  # of the classes of all clients together, in bits
    mean_entropy: float | None  # of single clients, weighted by their examples
    mean_distance: float | None  # total variation distance from the pool, weighted by their examples


def skew(split: Split) -> Skew:
    """Return the skew of a split."""
    pool = [sum(counts) for counts in zip(*(client["labels"] for client in split.clients), strict=True)] if (
        split.classes
    ) else []  # fmt: skip
    clients = [
        ClientSkew(
            client["name"],
            client["train"],
            sum(count > 0 for count in labels) if split.classes else None,
            _entropy(labels),
            _distance(labels, pool),
        )
        for client in split.clients
        for labels in [client.get("labels", ())]
    ]
    sizes = [client.train for client in clients]
    return Skew(
        clients,
        min(sizes),
        statistics.median(sizes),
        max(sizes),
        _entropy(pool),
        _weighted([(client.entropy, client.train) for client in clients]),
        _weighted([(client.distance, client.train) for client in clients]),
    )


def _entropy(counts: Sequence[int]) -> float | None:
    total = sum(counts)
    if not total:
        return None
    return abs(sum(count / total * math.log2(count / total) for count in counts if count))


def _distance(counts: Sequence[int], pool: Sequence[int]) -> float | None:
    """Return half the sum of the differences of two distributions: the share of examples that would have to change."""
    own, whole = sum(counts), sum(pool)
    if not own:
        return None
    return sum(abs(count / own - both / whole) for count, both in zip(counts, pool, strict=True)) / 2


def _weighted(values: Sequence[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in values if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None
