"""Test the hypotheses about a study, and describe the drift of its clients, as Markdown.

    PYTHONPATH=src:studies python studies/frozen/contrasts.py digits-seeds
    PYTHONPATH=src:studies python studies/frozen/contrasts.py digits-value
    PYTHONPATH=src:studies python studies/frozen/contrasts.py cifar100-long

`play.py table` has differences of scores to `never`, which is FedAvg. Here are also those of spreads, between two
settings, and between two frozen sets. All are paired by seed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from playing.choice import read_runs
from playing.lines import Line
from playing.study import Study, read_study
from playing.tables import Row, p_text, paired_by_seed, summarize

from partita.report.comparison import Difference
from partita.report.tables import holm

DIGITS, VALUE = "digits-seeds", "digits-value"
THREE, ORDERS, KEPT, TEN = (
    "labels, 3 clients",
    "orders, 3 clients",
    "labels, 3 clients, moments kept",
    "labels, 10 clients",
)
TAGS = ("query", "key", "value", "mlp")
LAST = 10  # rounds over which drift and the rise of the score are measured

Values = Mapping[int, float]  # by seed
Rows = Mapping[str, Mapping[str, Row]]  # by setting and arm


def read(name: str) -> tuple[Study, list[Line], Rows]:
    """Return a study, the lines of its runs, and their summary."""
    study = read_study(Path(__file__).with_name(f"{name}.toml"))
    lines = read_runs(study, "run")
    rows = {setting_of(point): {row.arm: row for row in summarize(study, lines, point)} for point in study.points()}
    return study, lines, rows


def setting_of(point: Mapping[str, Any]) -> str:
    """Return the name of a point: of one axis its value, of several such as `3 clients, 20 epochs`."""
    if len(point) == 1:
        [name] = point.values()
        return str(name)
    return ", ".join(
        f"{value} {axis.removesuffix('s') if str(value) == '1' else axis}" for axis, value in point.items()
    )


def lines_of(lines: Sequence[Line], setting: str, arm: str) -> list[Line]:
    """Return the lines of an arm in a setting, one for each seed."""
    return [line for line in lines if line["arm"] == arm and setting_of(line["point"]) == setting]


def gaps(rows: Rows, setting: str, arm: str) -> dict[int, float]:
    """Return by seed how far an arm is above `never`."""
    after, before = rows[setting][arm].means, rows[setting]["never"].means
    return {seed: after[seed] - before[seed] for seed in sorted(set(after) & set(before))}


def detrended(line: Line, last: int) -> float:
    """Return the standard deviation of the last rounds' accuracies around their straight line."""
    values, places = line["test"]["accuracy"][-last:], np.arange(last)
    rests = values - np.polyval(np.polyfit(places, values, 1), places)
    return float(np.sqrt(np.square(rests).sum() / (last - 2)))


def text(found: Difference, digits: int) -> str:
    assert found.mean is not None
    assert found.low is not None
    assert found.high is not None
    signed = f"{100 * found.mean:+.{digits}f} [{100 * found.low:.{digits}f}, {100 * found.high:.{digits}f}]"
    return signed.replace("-", "−")


def seed_tests(rows: Rows) -> dict[str, Difference]:
    """Return the differences of the hypotheses about `digits-seeds.toml`."""
    return {
        "1. spread, 0.3, labels, 3 clients": paired_by_seed(rows[THREE]["0.3"].spreads, rows[THREE]["never"].spreads),
        "2. spread, 0.3, labels, 10 clients": paired_by_seed(rows[TEN]["0.3"].spreads, rows[TEN]["never"].spreads),
        "3. accuracy, 0.3, labels, three clients less ten": paired_by_seed(
            gaps(rows, THREE, "0.3"), gaps(rows, TEN, "0.3")
        ),
        "4. accuracy, 0.3, labels, 10 clients": paired_by_seed(rows[TEN]["0.3"].means, rows[TEN]["never"].means),
        "5. accuracy, 0.5, labels, 3 clients": paired_by_seed(rows[THREE]["0.5"].means, rows[THREE]["never"].means),
        "5. accuracy, 0.5, orders, 3 clients": paired_by_seed(rows[ORDERS]["0.5"].means, rows[ORDERS]["never"].means),
    }


def value_tests(rows: Rows) -> dict[str, Difference]:
    """Return the differences of the hypotheses about `digits-value.toml`."""
    labels, orders = rows[THREE], rows[ORDERS]
    return {
        "1. spread, 0.5, value, labels": paired_by_seed(labels["0.5, value"].spreads, labels["never"].spreads),
        "1. spread, 0.5, value, orders": paired_by_seed(orders["0.5, value"].spreads, orders["never"].spreads),
        "2. accuracy, 0.5, value, labels": paired_by_seed(labels["0.5, value"].means, labels["never"].means),
        "3. accuracy, 0.8, value, labels": paired_by_seed(labels["0.8, value"].means, labels["never"].means),
        "3. accuracy, 0.8, value, orders": paired_by_seed(orders["0.8, value"].means, orders["never"].means),
        "4. accuracy, 0.5, orders": paired_by_seed(orders["0.5"].means, orders["never"].means),
        "5. accuracy, 0.8, value, to 0.8, labels": paired_by_seed(labels["0.8, value"].means, labels["0.8"].means),
        "5. accuracy, 0.8, value, to 0.8, orders": paired_by_seed(orders["0.8, value"].means, orders["0.8"].means),
    }


TESTS = {DIGITS: seed_tests, VALUE: value_tests}


def hypotheses(tests: Mapping[str, Difference]) -> str:
    """Return a table of the hypotheses' differences, with Holm's correction over all of them."""
    corrected = holm([found.p or 0.0 for found in tests.values()])
    table = ["| difference to `never` | points, paired [95%] | p | p (Holm) |", "|---|--:|--:|--:|"]
    for (what, found), p in zip(tests.items(), corrected, strict=True):
        digits = 2 if "spread" in what else 1
        table.append(f"| {what} | {text(found, digits)} | {p_text(found.p)} | {p_text(p)} |")
    return "\n".join(table)


def spreads(study: Study, lines: Sequence[Line], rows: Rows) -> str:
    """Return a table of the spread in the last rounds, also without its trend, by setting and arm."""
    arms = [arm for arm in study.arms if arm != "never"]
    heads = [f"`{arm}`" for arm in arms]
    table = [
        f"| spread | `never` | {' | '.join(heads)} | without the trend: `never` | {' | '.join(heads)} |",
        f"|---|{'--:|' * (2 * len(arms) + 2)}",
    ]
    for setting, own in rows.items():
        flat = {
            arm: {line["seed"]: detrended(line, study.last) for line in lines_of(lines, setting, arm)}
            for arm in study.arms
        }
        cells = []
        for by_arm in ({arm: row.spreads for arm, row in own.items()}, flat):
            cells.append(f"{100 * statistics.fmean(by_arm['never'].values()):.2f}")
            cells += [text(paired_by_seed(by_arm[arm], by_arm["never"]), 2) for arm in arms]
        table.append(f"| {setting} | {' | '.join(cells)} |")
    return "\n".join(table)


def between(rows: Rows, after: str, before: str) -> str:
    """Return a table of the difference between two arms, by setting."""
    table = [f"| `{after}` less `{before}` | points, paired [95%] | p |", "|---|--:|--:|"]
    for setting, own in rows.items():
        found = paired_by_seed(own[after].means, own[before].means)
        table.append(f"| {setting} | {text(found, 1)} | {p_text(found.p)} |")
    return "\n".join(table)


def drift(lines: Sequence[Line], rows: Rows) -> str:
    """Return a table of how far clients' updates are apart by tag, over the last rounds of `never`."""
    table = [f"| dispersion | {' | '.join(TAGS)} |", f"|---|{'--:|' * len(TAGS)}"]
    for setting in rows:
        own = lines_of(lines, setting, "never")
        means = [
            statistics.fmean(statistics.fmean(line[f"drift.{tag}.dispersion"][-LAST:]) for line in own) for tag in TAGS
        ]
        table.append(f"| {setting} | {' | '.join(f'{mean:.2f}' for mean in means)} |")
    return "\n".join(table)


def rise(study: Study, lines: Sequence[Line], rows: Rows) -> str:
    """Return a table of how many points a round the score gains over the last rounds, by setting and arm."""
    heads = " | ".join(f"`{arm}`" for arm in study.arms)
    table = [f"| points a round | {heads} |", f"|---|{'--:|' * len(study.arms)}"]
    for setting in rows:
        cells = []
        for arm in study.arms:
            scores = [line["test"]["accuracy"][-LAST:] for line in lines_of(lines, setting, arm)]
            mean = statistics.fmean(float(np.polyfit(np.arange(LAST), own, 1)[0]) for own in scores)
            cells.append(f"{100 * mean:+.2f}".replace("-", "−"))
        table.append(f"| {setting} | {' | '.join(cells)} |")
    return "\n".join(table)


def page_tables(study: Study, lines: Sequence[Line], rows: Rows) -> list[str]:
    """Return the tables of the page."""
    tested = hypotheses(TESTS[study.name](rows)) if study.name in TESTS else rise(study, lines, rows)
    if study.name == VALUE:
        return [tested, spreads(study, lines, rows), between(rows, "0.5, value", "0.5")]
    compared = [between(rows, "0.3", "0.3, random set"), between(rows, "0.5", "0.3")]
    return [tested, spreads(study, lines, rows), *compared, drift(lines, rows)]


def main() -> None:
    for name in sys.argv[1:] or [DIGITS]:
        print("\n\n".join(page_tables(*read(name))))


if __name__ == "__main__":
    main()
