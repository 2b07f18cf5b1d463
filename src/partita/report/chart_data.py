"""The charts of the page: which values they show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean
from typing import Any

from partita.record.metric import Metric, metric_named
from partita.report import plan, privacy
from partita.report.charts import MEGABYTES, ROUNDS, SECONDS, Axis, Chart, Line, View, chart
from partita.report.load import Row, RunRecord, by_label, number, personal, present, sent
from partita.report.plot_style import ROLES
from partita.report.tables import gains, local_baseline, mean, recorded_metrics, standard_deviation


@dataclass(frozen=True)
class Curve:
    """Mean and sample standard deviation over the seeds with a value after a round."""

    rounds: list[int]  # completed rounds, so the first is 1
    mean: list[float]  # mean over seeds
    sd: list[float]  # 0 if only one seed reached the round
    megabytes: list[float] | None  # sent up by all clients so far; None if bytes were not recorded
    seconds: list[float] | None  # so far; None if times were not recorded


def curve_by_round(runs: Sequence[RunRecord], value_of: Callable[[Row], float | None], scale: float = 1.0) -> Curve:
    """Compute the curve of one label.

    Args:
        runs: The runs of the label.
        value_of: Reads the value from a row; None if the row has none.
        scale: Factor from recorded to shown values.
    """
    by_round: dict[int, list[float]] = {}
    for run in runs:
        for row in run.rows:
            if (value := value_of(row)) is not None:
                by_round.setdefault(row["round"], []).append(scale * value)
    rounds = sorted(by_round)
    means = [fmean(by_round[round]) for round in rounds]
    return Curve(
        rounds=[round + 1 for round in rounds],
        mean=means,
        sd=[_deviation(by_round[round], center) for round, center in zip(rounds, means, strict=True)],
        megabytes=_at_rounds([_megabytes(run) for run in runs], rounds),
        seconds=_at_rounds([_seconds(run) for run in runs], rounds),
    )


def _deviation(values: Sequence[float], center: float) -> float:
    """Return the sample standard deviation. `statistics.stdev` computes with fractions, too slow for every round."""
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / max(1, len(values) - 1))


def curve_of(runs: Sequence[RunRecord], metric: Metric) -> Curve:
    """Compute the curve of a test metric, in display units."""
    return curve_by_round(runs, lambda row: number((row.get("test") or {}).get(metric.name)), metric.scale)


def _at_rounds(sums: Sequence[dict[int, float]], rounds: Sequence[int]) -> list[float] | None:
    """Return the mean over seeds of what was spent by the end of each round; None if a round has no value."""
    spent = [mean([by_run[round] for by_run in sums if round in by_run]) for round in rounds]
    return None if None in spent else present(spent)


def _megabytes(run: RunRecord) -> dict[int, float]:
    """Return the megabytes sent up by the end of each round. Empty if bytes were not recorded."""
    sums = accumulate(size / 1e6 for size in sent(run, "up") or ())
    return dict(zip((row["round"] for row in run.rows), sums, strict=False))


def _seconds(run: RunRecord) -> dict[int, float]:
    """Return the seconds by the end of each round. Empty if a row has none."""
    seconds = [number(row.get("seconds")) for row in run.rows]
    sums = accumulate(()) if None in seconds else accumulate(present(seconds))
    return dict(zip((row["round"] for row in run.rows), sums, strict=False))


ClientValues = Mapping[int, Mapping[str, float]]  # seed -> client -> value
LOW_RATE = 1e-3  # rates of attacks below this are drawn at it, because the axes are logarithmic


def curves_chart(records: Sequence[RunRecord], metric: Metric) -> Chart | None:
    """Return the chart of all scores by round, with `metric` first."""
    groups = by_label(records)
    known = [metric, *(each for record in records for each in record.metrics)]
    names = sorted(recorded_metrics(records), key=lambda name: name != metric.name)
    views = [_scores("test", metric_named(name, known), groups) for name in names]
    for part in ("validation", "personal"):
        rows: list[Mapping[str, Any]] = [row for run in records for row in run.rows]
        recorded = dict.fromkeys(name for row in rows for name in row.get(part) or ())
        views += [_scores(part, metric_named(name, known), groups) for name in recorded]
    views.append(_view("train loss", "train loss", groups, lambda row: number(row.get("train_loss"))))
    repeated = any(len(runs) > 1 for runs in groups.values())
    spread = "the band is ± one sample standard deviation" if repeated else "there is one seed, so no spread"
    if repeated and any(run.stopped or not run.finished for run in records):
        spread += "; if a run is unfinished or stopped early, the mean is over the seeds that reached the round"
    marked = any(plan.changes(runs) for runs in groups.values())
    marks = (
        f" Dashed vertical lines: changes of a label's plan (if there are at most {plan.CHANGES_MARKED})."
        if marked
        else ""
    )
    return chart(
        "curves",
        f"{metric.name.capitalize()} by round",
        f"Test {metric.name} after each round, mean over seeds; {spread}.{marks} Choose another score, or the bytes "
        "that all clients together have sent to the server, or the seconds so far.",
        views,
        list(groups),
        (ROUNDS, MEGABYTES, SECONDS),
    )


def _scores(part: str, metric: Metric, groups: Mapping[str, list[RunRecord]]) -> View:
    def value(row: Mapping[str, Any]) -> float | None:
        scores = row.get(part) or {}
        if part == "personal":
            return mean(present(map(number, (scores.get(metric.name) or {}).values())))
        return number(scores.get(metric.name))

    title = f"{part} {metric.title_with_unit}" + (", mean over clients" if part == "personal" else "")
    return replace(_view(f"{part} {metric.name}", title, groups, value, metric.scale), limits=_limits(metric))


def _limits(metric: Metric) -> tuple[float, float] | None:
    return (0.0, metric.scale) if metric.fraction else None


def _view(
    name: str,
    title: str,
    groups: Mapping[str, list[RunRecord]],
    value: Callable[[Row], float | None],
    scale: float = 1.0,
) -> View:
    curves = {label: curve_by_round(runs, value, scale) for label, runs in groups.items()}
    lines = [_line(label, curve) for label, curve in curves.items() if curve.rounds]
    marks = [(first + 0.5, label) for label, runs in groups.items() for first in plan.changes(runs)]
    return View(name, title, lines, marks if lines else ())


def _line(label: str, curve: Curve) -> Line:
    return Line(label, (curve.rounds, curve.megabytes, curve.seconds), curve.mean, curve.sd)


def drift_chart(records: Sequence[RunRecord]) -> Chart | None:
    """Return the chart of the drift by round, a view for each role."""
    groups = by_label(records)
    seen = {group for run in records for row in run.rows for group in row.get("drift") or {}}

    def dispersion(role: str) -> Callable[[Row], float | None]:
        return lambda row: number(((row.get("drift") or {}).get(role) or {}).get("dispersion"))

    views = [_view(role, f"dispersion of {role} updates", groups, dispersion(role)) for role in ROLES if role in seen]
    return chart(
        "drift",
        "Drift by role",
        "Distance of the clients' updates from their mean, relative to its norm (0: all agree), by role of the "
        "parameters, mean over seeds with its standard deviation. A line ends when the role is no longer sent up.",
        [View(view.name, view.title, view.lines) for view in views],
        list(groups),
        (ROUNDS, MEGABYTES, SECONDS),
    )


def personal_values(records: Sequence[RunRecord], metric: Metric) -> dict[str, ClientValues]:
    """Return the known values of the last personal evaluation, by label, seed and client."""
    return {
        label: {
            run.seed: {client: value for client, value in personal(run, metric.name).items() if value is not None}
            for run in runs
        }
        for label, runs in by_label(records).items()
    }


def clients_chart(records: Sequence[RunRecord], metric: Metric, order: Callable[[str], object]) -> Chart | None:
    """Return the chart of each client's score on its own test set and of its gain over local training.

    Args:
        records: The runs.
        metric: The metric of the scores.
        order: Sorts clients.
    """
    groups = by_label(records)
    scores = personal_values(records, metric)
    gained = gains(groups, metric)
    score, unit = f"personal {metric.title_with_unit}", "percentage points" if metric.fraction else metric.name
    gain = f"gain over {local_baseline(groups)}, {unit}"
    higher = metric.higher_is_better
    caption = (
        f"The {metric.name} of each client on its own test set, mean over seeds; the bar is ± one sample standard "
        "deviation. Worst to best: clients of each seed sorted by their result, then averaged over seeds; a random "
        "split gives a client other data for each seed."
    )
    if gained:
        caption += (
            " Gain: difference between each client's result and its result with local training, for the same seed and "
            "test set. Clients above 0 gain; clients below would do better alone."
        )
    return chart(
        "personal",
        "Individual clients",
        caption,
        [
            replace(_by_client("by client", score, scores, metric.scale, order), limits=_limits(metric)),
            replace(_by_rank("worst to best", score, scores, metric.scale, higher), limits=_limits(metric)),
            _by_client("gain by client", gain, gained, metric.scale, order),
            _by_rank("gain, lowest to highest", gain, gained, metric.scale, True),
        ],
        list(groups),
        (Axis("client", "client", whole=True),),
        points=True,
    )


def _by_client(
    name: str,
    title: str,
    values: Mapping[str, ClientValues],
    scale: float,
    order: Callable[[str], object],
) -> View:
    clients = sorted(
        {client for seeds in values.values() for own in seeds.values() for client in own},
        key=order,  # type: ignore[arg-type]
    )
    lines = []
    for label, seeds in values.items():
        known = [[scale * own[client] for own in seeds.values() if client in own] for client in clients]
        lines.append(_dots(label, known))
    return View(name, title, [line for line in lines if any(value is not None for value in line.y)], names=clients)


def _by_rank(name: str, title: str, values: Mapping[str, ClientValues], scale: float, higher: bool) -> View:
    lines = []
    for label, seeds in values.items():
        ranked = [sorted((scale * value for value in own.values()), reverse=not higher) for own in seeds.values()]
        count = max(map(len, ranked), default=0)
        if count:
            known = [[own[rank] for own in ranked if rank < len(own)] for rank in range(count)]
            lines.append(_dots(label, known))
    longest = max((len(line.y) for line in lines), default=0)
    return View(name, title, lines, names=[f"rank {rank + 1}" for rank in range(longest)])


def _dots(label: str, known: Sequence[Sequence[float]]) -> Line:
    return Line(
        label,
        (list(range(len(known))),),
        [mean(values) for values in known],
        [standard_deviation(values) for values in known],
    )


def epsilon_chart(records: Sequence[RunRecord]) -> Chart | None:
    """Return the chart of the privacy spent by round, a line for each seed."""
    lines = []
    for label, runs in by_label(records).items():
        for points in filter(None, map(privacy.spent, runs)):
            rounds, values = zip(*points, strict=True)
            lines.append(Line(label, (rounds,), values))
    return chart(
        "epsilon",
        "Epsilon by round",
        "Epsilon of the worst-off client after each round, one line per seed. Smaller is more private.",
        [View("epsilon", "epsilon spent", lines)],
        list(by_label(records)),
    )


def attacks_chart(records: Sequence[RunRecord]) -> Chart | None:
    """Return the chart of the ROC curves of attacks, a view for each attack."""
    names = dict.fromkeys(name for record in records for name in record.audit.get("attacks") or {})
    views = []
    for name in names:
        lines = [Line(None, ([LOW_RATE, 1.0],), [LOW_RATE, 1.0])]  # chance
        for record in records:
            if attack := (record.audit.get("attacks") or {}).get(name):
                points = sorted(
                    {
                        (max(LOW_RATE, false), max(LOW_RATE, true))
                        for false, true in zip(attack["false"], attack["true"], strict=False)
                    }
                )
                lines.append(Line(record.label, ([false for false, _ in points],), [true for _, true in points]))
        views.append(View(name, "true positive rate", lines, log=(True, True)))
    return chart(
        "attacks",
        "Membership inference",
        "True positive rate over false positive rate for all thresholds of the attack's score. On the dashed line an "
        "attack is no better than chance.",
        views,
        list(by_label(records)),
        (Axis("false positives", "false positive rate"),),
    )
