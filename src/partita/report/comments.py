"""Comments below a comparison: what its columns mean, and caveats of its runs."""

from __future__ import annotations

from collections.abc import Sequence

from partita.record.metric import Metric, metric_named
from partita.report.comparison import Difference, Line, worse_share
from partita.report.load import RunRecord, personal, settings

ONE_CLASS = "one predicted class"  # the alarm on such a model


def explain_columns(
    lines: Sequence[Line],
    target: float | None,
    asked: bool,
    metrics: Sequence[Metric],
    base: str | None,
    gap: int = 1,
) -> list[str]:
    """Explain the columns that are shown.

    Args:
        lines: The results of all labels.
        target: The value to reach, in recorded units; None if there is none.
        asked: Whether the user gave the target.
        metrics: The metric, and those of the other scores.
        base: The label of local training, which gains refer to; None if there is none.
        gap: The most rounds from one test to the next; 1 if every round was tested.
    """
    metric = metrics[0]
    comments = [
        f"{metric.name}: value of the last tested round, mean ± sample standard deviation over seeds"
        f"{'' if metric.higher_is_better else '; lower is better'}.",
        "stability: standard deviation over the last quarter of the rounds, averaged over seeds; lower is more stable.",
    ]
    compared = [line.difference for line in lines if line.difference]
    if compared:
        counts = sorted({difference.n for difference in compared})
        over = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
        points = "in percentage points, " if metric.fraction else ""
        comments.append(
            f"difference: to {lines[0].label}, {points}paired over common seeds ({over}), "
            "with the 95% interval and p of a paired t test."
        )
    tests = [difference for difference in compared if difference.p is not None]
    if any(difference.p_holm is not None for difference in tests):
        comments.append(f"p: corrected by Holm for {len(tests)} comparisons; the intervals are not corrected.")
    elif tests:
        comments.append("p: not corrected for multiple comparisons.")
    if any(line.personal is not None for line in lines):
        comments.append(
            "personal: on each client's own test set; spread is the standard deviation over clients, worst tenth the "
            "mean over the worst 10% of them."
        )
    if any(line.gain for line in lines):
        comments.append(
            f"gain: difference to the client's result under {base}, where it trains alone, mean over clients and "
            "common seeds; better off is the fraction of clients that gain."
        )
    if any(line.epsilon is not None for line in lines):
        comments.append("ε: privacy cost of training after the last round, largest over seeds.")
    if any(len(line.scores) > 1 for line in lines):
        lower = [name for name in lines[0].scores if not metric_named(name, metrics).higher_is_better]
        worse = f"; lower is better for {', '.join(lower)}" if lower else ""
        comments.append(f"all scores: of the last tested round, mean ± sample standard deviation over seeds{worse}.")
    comments.append("client-round: one client sampled in one round, whether or not it answered.")
    comments.append("MB: sent in both directions in a whole run, mean over seeds; 1 MB = 10⁶ bytes.")
    if target is not None:
        origin = "as requested"
        if not asked and (reference := lines[0].final) is not None:
            origin = f"{worse_share(metric, reference):.0%} of the final mean of {lines[0].label}"
        comments.append(
            f"rounds to {metric.show(target)}: {origin}; the first round counts as 1; median over seeds, where a seed "
            f"that did not reach it counts as infinitely late{_read_at_tests(gap)}."
        )
    return comments


def _read_at_tests(gap: int) -> str:
    return "" if gap == 1 else f"; read at tested rounds only, up to {gap} rounds apart, so up to {gap - 1} too late"


def caveats(
    groups: dict[str, list[RunRecord]],
    finals: dict[str, dict[int, float | None]],
    differences: dict[str, Difference],
    metric: str,
) -> list[str]:
    """List caveats for the reader.

    Args:
        groups: The runs by label.
        finals: The final value by label and seed; None if it is unknown.
        differences: The difference to the first label, by label.
        metric: The name of the metric.
    """
    first, comments = next(iter(groups)), []
    for label, runs in groups.items():
        for run in runs:
            if not run.finished:
                so_far = f"{len(run.rows)} of {run.config.get('rounds', '?')} rounds"
                comments.append(f"{label}, seed {run.seed}: unfinished ({so_far}); its last tested round is used.")
            elif run.stopped:
                comments.append(f"{label}, seed {run.seed}: {run.stopped}.")
        known = [settings(run) for run in runs]
        if differing := [key for key in known[0] if any(values.get(key) != known[0][key] for values in known)]:
            comments.append(
                f"{label}: its runs differ in more than the seed ({', '.join(differing)}); they are not repeats."
            )
        if unknown := [str(seed) for seed, value in finals[label].items() if value is None]:
            comments.append(f"{label}: no final {metric} for seed {', '.join(unknown)}; left out of the mean.")
        own = [value for run in runs for value in personal(run, metric).values()]
        if None in own:
            comments.append(f"{label}: {own.count(None)} of {len(own)} personal values are missing and left out.")
        if any(run.privacy.get("repeatable") for run in runs):
            comments.append(f"{label}: anyone can recompute its noise from the seed, so its epsilon is only simulated.")
        comments += _one_class(label, runs)
        if len(runs) == 1:
            comments.append(f"{label}: one seed, so no spread over seeds.")
        if label != first:
            comments += _paired_caveats(groups[first], runs, differences[label])
    return comments


def _one_class(label: str, runs: list[RunRecord]) -> list[str]:
    """Warn of models that predict one class in the last tested round."""
    last = [row for run in runs for row in [row for row in run.rows if row.get("test")][-1:]]
    count = sum(ONE_CLASS in row.get("alarms", {}) for row in last)
    if not count:
        return []
    return [
        f"{label}: predicts one class in {count} of {len(runs)} runs: there, scores only tell how frequent that class "
        "is in the test set; the alarm says which class, and what to try."
    ]


def _paired_caveats(first: list[RunRecord], runs: list[RunRecord], difference: Difference) -> list[str]:
    label, comments = runs[0].label, []
    common = len({run.seed for run in runs} & {run.seed for run in first})
    if difference.n < common:
        comments.append(
            f"{label}: {common - difference.n} of {common} common seeds left out of the difference, "
            "because one run of the pair is behind or has no value."
        )
    if difference.n < 2:
        comments.append(
            f"{label}: no paired difference to {first[0].label}, which needs 2 pairs of runs; here n = {difference.n}."
        )
    elif difference.p is None:
        comments.append(
            f"{label}: the same difference to {first[0].label} for every seed, so there is nothing to test."
        )
    return comments
