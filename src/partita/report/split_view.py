"""What clients hold: as a picture for pages and files, and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from partita.record import forms
from partita.report.load import ReportError
from partita.report.skew import ClientSkew, Skew, skew
from partita.report.split_figure import NAMED, Split, split_grid_of, split_rows
from partita.storage.png import data_uri, encode_png
from partita.storage.safe_text import printable

LEFT, ACROSS, TOP, BARS = 150, 800, 14, 90  # margins, width of the picture and height of its bars, in its units
NUMBERED = 24  # cells show their counts up to this many clients and classes
COLOR = (0, 114, 178)  # blue of the Okabe–Ito palette
STRONGEST = 0.72  # opacity of the largest count, on which text stays readable
NAME_LENGTH = 20
CLASSES_SHOWN = 4  # most frequent classes of a client in the terminal
BAR_WIDTH = 14
FORMATS = (".html", ".png", ".svg")


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
    """Write the picture as an SVG or PNG image, or as an HTML page with the table of clients."""
    from partita.report.elements import Table
    from partita.report.templating import render

    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix.lower() == ".png":
        split_grid_of([split], only=True).savefig(out, dpi=150)
    elif out.suffix.lower() == ".svg":
        out.write_text(render("split_svg", picture=picture(split), title=title, standalone=True), encoding="utf-8")
    else:
        headings = ("client", "train", "validation", "test", *(["labels in train"] if split.classes else []))
        table = Table("Clients' examples", headings, split_rows(split))
        text = render("split_page", title=title, picture=picture(split), table=table, styles={}, standalone=False)
        out.write_text(text, encoding="utf-8")
