"""Markdown tables of a study: one for each point of its axes."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from partita.record.metric import Metric
from partita.report.comparison import Difference
from partita.report.tables import corrected, paired_difference
from playing.choice import built_in, tail
from playing.lines import Line
from playing.study import Point, Study, edges

MISSING = "–"
LAST = "last round"  # title of a column
PARTS = {
    "test": "the central test set",
    "personal": "the clients' own test sets, mean over clients",
    "unseen": "the own test sets of clients that took no part, mean over them",
}


@dataclass(frozen=True)
class Row:
    """One arm at one point of the axes. Values are as recorded, by seed.

    Attributes:
        arm: Name of the arm.
        means: By seed, the mean over the last tested rounds.
        finals: By seed, the score of the last tested round.
        spreads: By seed, the standard deviation within the last tested rounds; empty if there is one such round.
        worst: By seed, the worst client's last score; empty without clients' own scores.
        megabytes: By seed, what was sent in both directions.
        seconds: By seed, how long the run took.
        epsilon: The largest over seeds; None if the runs are not private.
        chosen: What tuning chose.
        edge: The keys whose chosen value is at the edge of its grid, as the study has it now.
        lost: The seeds whose model was not finite in the end. They are in no mean.
        difference: To the baseline, paired by seed; None for the baseline.
    """

    arm: str
    means: Mapping[int, float]
    finals: Mapping[int, float]
    spreads: Mapping[int, float]
    worst: Mapping[int, float]
    megabytes: Mapping[int, float]
    seconds: Mapping[int, float]
    epsilon: float | None
    chosen: Mapping[str, Any]
    edge: tuple[str, ...]
    lost: tuple[int, ...]
    difference: Difference | None = None


def summarize(
    study: Study, lines: Iterable[Line], point: Point, score: str | None = None, on: str | None = None
) -> list[Row]:
    """Return the rows of one point, in the order of the study's arms; arms without a run are left out.

    Args:
        study: The study.
        lines: The lines of its runs.
        point: The point.
        score: Another metric than the study's.
        on: Another part than the study's: "test", "personal" or "unseen".
    """
    metric, part = built_in(score or study.score), on or study.on
    groups: dict[str, list[Line]] = {name: [] for name in study.arms}
    for line in lines:
        if line["kind"] == "run" and line["point"] == dict(point) and line["arm"] in groups:
            groups[line["arm"]].append(line)
    rows = {arm: _row(study, arm, own, metric, part) for arm, own in groups.items() if own}
    if study.baseline not in rows:
        return list(rows.values())
    before = rows[study.baseline].means
    differences = {arm: paired_by_seed(row.means, before) for arm, row in rows.items() if arm != study.baseline}
    differences = corrected(differences)
    return [replace(row, difference=differences.get(arm)) for arm, row in rows.items()]


def paired_by_seed(after: Mapping[int, float], before: Mapping[int, float]) -> Difference:
    """Return the mean of after less before, over the seeds that both have."""
    return paired_difference([(before[seed], after[seed]) for seed in sorted(after.keys() & before.keys())])


def _row(study: Study, arm: str, lines: Sequence[Line], metric: Metric, part: str) -> Row:
    ordered = sorted(lines, key=lambda line: line["seed"])
    tails = {line["seed"]: tail(line, metric.name, part, study.last) for line in ordered}
    known = {seed: values for seed, values in tails.items() if values}
    # Old lines may hold one mean over several last rounds in place of single rounds.
    single = {seed: values for seed, values in known.items() if not any(line.get("averaged") for line in lines)}
    scored = [line["seed"] for line in lines if "diverged" in line or (line.get(part) or {}).get(metric.name)]
    kept = [line for line in lines if line["seed"] in known]
    worse = min if metric.higher_is_better else max
    by_client = "unseen" if part == "unseen" else "personal"
    clients = {
        line["seed"]: worse(own.values())
        for line in kept
        if (own := ((line.get(by_client) or {}).get("clients") or {}).get(metric.name))
    }
    costs = [line["epsilon"] for line in lines if line.get("epsilon") is not None]
    chosen = lines[0].get("chosen") or {}
    return Row(
        arm,
        {seed: statistics.fmean(values) for seed, values in known.items()},
        {seed: values[-1] for seed, values in single.items()},
        {seed: statistics.stdev(values) for seed, values in known.items() if len(values) > 1},
        clients,
        {line["seed"]: sum(map(sum, line["bytes"].values())) / 1e6 for line in kept if line.get("bytes")},
        {line["seed"]: line["seconds"] for line in kept if line.get("seconds") is not None},
        max(costs, default=None),
        chosen,
        edges(study, study.arms[arm], chosen),
        tuple(seed for seed in tails if seed not in known and seed in scored),
    )


def tables(study: Study, lines: Sequence[Line], score: str | None = None, on: str | None = None) -> str:
    """Return all tables of a study as Markdown.

    Args:
        study: The study.
        lines: The lines of its runs.
        score: Another metric than the study's.
        on: Another part than the study's.
    """
    metric, part = built_in(score or study.score), on or study.on
    parts = []
    for point in study.points():
        rows = summarize(study, lines, point, score, on)
        title = ", ".join(f"{axis} = {value}" for axis, value in point.items())
        if rows:
            parts.append("\n\n".join([*([f"**{title}**"] if title else []), table(study, rows, metric)]))
    if not parts:
        return f"{study.name}: no runs yet"
    where = PARTS[part]
    last = f"mean over the last {study.last} tested rounds" if study.last > 1 else "score of the last tested round"
    about = (
        f"{metric.title_with_unit} on {where}: the {last}, then mean ± standard deviation over seeds. "
        f"Differences to `{study.baseline}` are paired by seed, with Student's 95% interval; p is of a paired t test, "
        "and Holm's correction is over the comparisons of each table."
    )
    return "\n\n".join([*parts, about]) + "\n"


def table(study: Study, rows: Sequence[Row], metric: Metric) -> str:
    """Return the table of one point, with footnotes."""
    private = any(row.epsilon is not None for row in rows)
    tuned = any(row.chosen for row in rows)
    head = ["", metric.title_with_unit, LAST, "sd in the last rounds", "worst client"]
    head += [f"to `{study.baseline}`", "p", "p (Holm)", "MB", "s"]
    head += [*(["epsilon"] if private else []), *(["chosen"] if tuned else [])]
    lines, notes = [head], []
    for row in rows:
        if not row.means and not row.lost:
            notes.append(f"`{row.arm}` has no scores of this kind.")
            continue
        mark = ""
        for key in row.edge:
            mark += "\\*"
            notes.append(f"{mark} of `{row.arm}`: {key} = {row.chosen[key]} is at the edge of its grid.")
        if row.lost:
            notes.append(f"`{row.arm}`: {len(row.lost)} of {len(row.lost) + len(row.means)} runs were not finite.")
        if len(row.means) + len(row.lost) < len(study.seeds):
            notes.append(f"`{row.arm}`: {len(row.means) + len(row.lost)} of {len(study.seeds)} seeds.")
        difference = row.difference
        if difference is not None and difference.n < len(row.means):
            notes.append(f"`{row.arm}`: the difference is over {difference.n} seeds.")
        cells = [
            f"`{row.arm}`{mark}",
            spread(row.means.values(), metric),
            spread(row.finals.values(), metric),
            metric.text(statistics.fmean(row.spreads.values())) if row.spreads else MISSING,
            spread(row.worst.values(), metric),
            interval(difference, metric),
            *(p_text(value) for value in ((difference.p, difference.p_holm) if difference else (None, None))),
            _mean(row.megabytes.values(), ",.1f"),
            _mean(row.seconds.values(), ".1f"),
        ]
        cells += [MISSING if row.epsilon is None else f"{row.epsilon:.2f}"] if private else []
        cells += [", ".join(f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
                            for key, value in row.chosen.items()) or MISSING] if tuned else []  # fmt: skip
        lines.append(cells)
    # A column that says nothing is left out, and so is a last round that is all that counts.
    kept = [
        place
        for place, title in enumerate(head)
        if not place or (any(line[place] != MISSING for line in lines[1:]) and not (title == LAST and study.last == 1))
    ]
    lines = [[line[place] for place in kept] for line in lines]
    lines.insert(1, ["---", *["--:"] * (len(kept) - 1)])
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([text, *(["\n".join(f"- {note}" for note in notes)] if notes else [])])


def matrix(study: Study, lines: Sequence[Line], score: str | None = None, on: str | None = None) -> str:
    """Return one table of all arms by all points: mean ± standard deviation over seeds.

    Args:
        study: The study.
        lines: The lines of its runs.
        score: Another metric than the study's.
        on: Another part than the study's.
    """
    metric, points = built_in(score or study.score), study.points()
    titles = [", ".join(str(value) for value in point.values()) or metric.title_with_unit for point in points]
    columns = [{row.arm: row for row in summarize(study, lines, point, score, on)} for point in points]
    text = [["", *titles], ["---", *["--:"] * len(titles)]]
    for arm in study.arms:
        cells = []
        for rows in columns:
            row = rows.get(arm)
            lost = f" ({len(row.lost)} not finite)" if row and row.lost else ""
            cells.append(f"{spread(row.means.values(), metric) if row else MISSING}{lost}")
        if any(arm in rows for rows in columns):
            text.append([f"`{arm}`", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in text) + "\n"


def layers(study: Study, lines: Sequence[Line]) -> str:
    """Return a table of how often each arm's clients chose each layer: the share of clients, rounds and seeds, in %.

    Args:
        study: The study.
        lines: The lines of its runs, or of its tuning.
    """
    parts = []
    for point in study.points():
        own = [line for line in lines if line["point"] == dict(point)]
        shares = {arm: layer_shares([line for line in own if line["arm"] == arm]) for arm in study.arms}
        shares = {arm: found for arm, found in shares.items() if found}
        if not shares:
            continue
        numbers = range(max(max(found) for found in shares.values()) + 1)
        text = [["", "mean layer", *map(str, numbers)], ["---", *["--:"] * (len(numbers) + 1)]]
        for arm, found in shares.items():
            mean = sum(number * share for number, share in found.items()) / sum(found.values())
            text.append([f"`{arm}`", f"{mean:.1f}", *(f"{100 * found.get(number, 0.0):.0f}" for number in numbers)])
        title = ", ".join(f"{axis} = {value}" for axis, value in point.items())
        rows = "\n".join(f"| {' | '.join(line)} |" for line in text)
        parts.append("\n\n".join([*([f"**{title}**"] if title else []), rows]))
    if not parts:
        return f"{study.name}: no runs whose clients choose layers"
    about = "How often a layer was chosen, in % of clients, rounds and seeds. Layer 0 is next to the input."
    return "\n\n".join([*parts, about]) + "\n"


def layer_shares(lines: Iterable[Line]) -> dict[int, float]:
    """Return the share of clients and rounds that chose a layer, by its number; empty if no client chose layers."""
    choices = [chosen for line in lines for row in line.get("layers") or () for chosen in (row or {}).values()]
    times = Counter(int(layer.removeprefix("layer.")) for chosen in choices for layer in chosen)
    return {number: count / len(choices) for number, count in sorted(times.items())}


def tried(study: Study, lines: Sequence[Line]) -> str:
    """Return one table of all settings that tuning tried, with their scores on validation.

    Args:
        study: The study.
        lines: The lines of its tuning.
    """
    if study.tuning is None or not lines:
        return f"{study.name}: no tuning yet"
    metric = built_in(study.score)
    better = max if metric.higher_is_better else min
    text = [["", "score on validation by setting", "best"], ["---", "---", "--:"]]
    for point in study.tuning_points():
        for arm in study.arms:
            own = [line for line in lines if line["arm"] == arm and line["point"] == point]
            by_setting: dict[str, list[float | None]] = {}
            for line in own:
                values = tail(line, study.score, "validation", study.tuning.last)
                named = ", ".join(f"{key} {_setting(value)}" for key, value in line["chosen"].items())
                by_setting.setdefault(named, []).append(statistics.fmean(values) if values else None)
            # As in the choice: a setting counts only if all its seeds have a score.
            means = {
                named: statistics.fmean([value for value in values if value is not None])
                if None not in values
                else None
                for named, values in by_setting.items()
            }
            known = [mean for mean in means.values() if mean is not None]
            shown = "; ".join(
                f"{name}: {MISSING if mean is None else metric.text(mean)}" for name, mean in means.items()
            )
            if own:
                title = ", ".join([f"`{arm}`", *map(str, point.values())])
                text.append([title, shown, metric.text(better(known)) if known else MISSING])
    about = (
        f"{metric.title_with_unit} on the clients' validation parts: mean over the last {study.tuning.last} rounds, "
        f"seeds {', '.join(map(str, study.tuning.seeds))}; {MISSING}: not finite."
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in text) + f"\n\n{about}\n"


def _setting(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def spread(values: Iterable[float], metric: Metric) -> str:
    """Return mean ± standard deviation; the mean alone for one value."""
    known = list(values)
    if not known:
        return MISSING
    mean = metric.text(statistics.fmean(known))
    return f"{mean} ± {metric.text(statistics.stdev(known))}" if len(known) > 1 else mean


def interval(difference: Difference | None, metric: Metric) -> str:
    """Return a difference with its interval."""
    if difference is None or difference.mean is None:
        return MISSING
    mean = metric.text(difference.mean, "+")
    if difference.low is None or difference.high is None:
        return mean
    return f"{mean} [{metric.text(difference.low)}, {metric.text(difference.high)}]"


def p_text(value: float | None) -> str:
    """Return a p value as tables show it."""
    return MISSING if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"


def _mean(values: Iterable[float], form: str) -> str:
    known = list(values)
    return f"{statistics.fmean(known):{form}}" if known else MISSING
