"""Render the comparison as text, Markdown, JSON, or columns for the HTML page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from partita.record.metric import MISSING, Metric, metric_named, short
from partita.report.comparison import Comparison, Difference, Line, Reach, Score
from partita.storage.safe_text import printable

WIDTH = 110  # characters of a line in a terminal
SCORES_BESIDE = 6  # columns of scores that fit beside each other
PERSONAL_GROUP, SCORES, COSTS = "personal", "all scores", ("per client-round", "per run")


@dataclass(frozen=True)
class Column:
    """A column of the table: its group, its heading, and one cell per line."""

    group: str
    heading: str
    cells: tuple[str, ...]  # one text per line of the comparison


def columns(comparison: Comparison) -> list[Column]:
    """Return the columns that have content. All output formats use them."""
    several, metric = len(comparison.lines) > 1, metric_named(comparison.metric, comparison.metrics)
    corrected = any(line.difference and line.difference.p_holm is not None for line in comparison.lines)
    has_personal = any(line.personal is not None for line in comparison.lines)
    gained = any(line.gain for line in comparison.lines)
    private = any(line.epsilon is not None for line in comparison.lines)
    shown: list[tuple[bool, str, str, Callable[[Line], str]]] = [
        (True, "", "label", lambda line: line.label),
        (True, "", "seeds", lambda line: str(len(line.seeds))),
        (True, "test", metric.title_with_unit, lambda line: with_spread(metric, line.final, line.final_sd)),
        (True, "test", "stability", lambda line: metric.text(line.stability)),
        (several, "test", "difference [95%]", lambda line: _gap(metric, line.difference)),
        (several, "test", "p (Holm)" if corrected else "p", lambda line: _p(line.difference, corrected)),
        (
            has_personal,
            PERSONAL_GROUP,
            "mean, %" if metric.fraction else "mean",
            lambda line: metric.text(line.personal),
        ),
        (has_personal, PERSONAL_GROUP, "spread", lambda line: metric.text(line.personal_sd)),
        (has_personal, PERSONAL_GROUP, "worst tenth", lambda line: metric.text(line.personal_worst)),
        (
            gained,
            PERSONAL_GROUP,
            "gain",
            lambda line: MISSING if line.gain is None else metric.text(line.gain.mean, "+"),
        ),
        (
            gained,
            PERSONAL_GROUP,
            "better off",
            lambda line: MISSING if line.gain is None else f"{line.gain.better:.0%}",
        ),
        (True, "per client-round", "up", lambda line: size(line.up)),
        (True, "per client-round", "down", lambda line: size(line.down)),
        (True, "per run", "MB", lambda line: short(line.total_mb)),
        (True, "per run", f"rounds to {metric.show(comparison.target)}", lambda line: _reached(line.reach)),
        (private, "per run", "ε", lambda line: short(line.epsilon)),
        (True, "per run", "s per round", lambda line: short(line.seconds)),
    ]
    return [
        Column(group, heading, tuple(map(cell, comparison.lines))) for visible, group, heading, cell in shown if visible
    ]


def score_columns(comparison: Comparison) -> list[Column]:
    """Return a column for each recorded metric; none if there is only one, which the other columns show."""
    metrics = [metric_named(name, comparison.metrics) for name in comparison.lines[0].scores]
    if len(metrics) < 2:
        return []
    return [
        Column(SCORES, metric.title_with_unit, tuple(_score(metric, line.scores) for line in comparison.lines))
        for metric in metrics
    ]


def by_question(comparison: Comparison) -> dict[str, list[Column]]:
    """Return the columns as tables by title, which fit without scrolling. Each starts with the column of labels."""
    name, *rest = columns(comparison)
    scores = score_columns(comparison)
    more = {
        f"All scores, from {scores[place].heading}": scores[place : place + SCORES_BESIDE]
        for place in range(SCORES_BESIDE, len(scores), SCORES_BESIDE)
    }
    tables = {
        "Results": [column for column in rest if column.group not in (PERSONAL_GROUP, *COSTS)],
        "All scores": scores[:SCORES_BESIDE],
        **more,
        "Results by client": [column for column in rest if column.group == PERSONAL_GROUP],
        "Cost": [column for column in rest if column.group in COSTS],
    }
    return {title: [name, *chosen] for title, chosen in tables.items() if chosen}


def _score(metric: Metric, scores: Mapping[str, Score]) -> str:
    return with_spread(metric, scores[metric.name].mean, scores[metric.name].sd)


def with_spread(metric: Metric, value: float | None, sd: float | None) -> str:
    """Format a mean with its standard deviation, if that is known."""
    return metric.text(value) if sd is None else f"{metric.text(value)} ± {metric.text(sd)}"


def _gap(metric: Metric, difference: Difference | None) -> str:
    if difference is None or difference.mean is None:
        return MISSING
    interval = "" if difference.low is None else f" [{metric.text(difference.low)}, {metric.text(difference.high)}]"
    return metric.text(difference.mean, "+") + interval


def _p(difference: Difference | None, corrected: bool) -> str:
    value = None if difference is None else difference.p_holm if corrected else difference.p
    if value is None:
        return MISSING
    return "<0.001" if value < 0.001 else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def size(count: float | None) -> str:
    """Format bytes in a suitable unit."""
    if count is None:
        return MISSING
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{short(count / factor)} {unit}"
    return f"{count:.0f} B"


def _reached(reach: Reach | None) -> str:
    if reach is None:
        return MISSING
    counted = "" if reach.reached == reach.of else f" ({reach.reached} of {reach.of})"
    return f"not reached{counted}" if reach.rounds is None else f"{reach.rounds:g}{counted}"


def to_json(comparison: Comparison) -> str:
    """Render the comparison as JSON."""
    return json.dumps(asdict(comparison), indent=2, ensure_ascii=False, allow_nan=False)


def to_markdown(comparison: Comparison) -> str:
    """Render the comparison as one Markdown table, one of all recorded scores, and comments."""
    name, *rest = columns(comparison)
    tables = [[name, *chosen] for chosen in (rest, score_columns(comparison)) if chosen]
    comments = "".join(f"- {_plain(comment)}\n" for comment in comparison.comments)
    return "\n".join([*map(markdown_table, tables), comments])


def markdown_table(shown: Sequence[Column]) -> str:
    """Render one table as Markdown."""
    groups = [f"{column.group}: {column.heading}" if column.group else column.heading for column in shown]
    rule = [":--" if place == 0 else "--:" for place in range(len(shown))]
    body = zip(*(column.cells for column in shown), strict=True)
    return "".join(f"| {' | '.join(_plain(cell) for cell in line)} |\n" for line in (groups, rule, *body))


def _plain(text: str) -> str:
    """Escape Markdown syntax in labels."""
    for mark in "\\|*_`<[":
        text = text.replace(mark, f"\\{mark}")
    return printable(text.replace("\n", " "))


def to_text(comparison: Comparison, width: int = WIDTH) -> str:
    """Render the comparison for a terminal, as tables below each other."""
    from rich.console import Console
    from rich.text import Text

    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as capture:
        for comment in comparison.comments:
            console.print(Text(f"· {printable(comment)}"))
    return "".join(text_table(*each, width) for each in by_question(comparison).items()) + capture.get()


def text_table(title: str, shown: Sequence[Column], width: int = WIDTH) -> str:
    """Render one table for a terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Text, so that brackets in a label are not markup
    name = Text(printable(title))
    table = Table(title=name, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(shown):
        heading = Text("\n".join(map(printable, filter(None, (column.group, column.heading)))))
        table.add_column(heading, justify="right" if place else "left", overflow="fold", no_wrap=place > 0)
    for cells in zip(*(column.cells for column in shown), strict=True):
        table.add_row(*(Text(printable(cell)) for cell in cells))
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
