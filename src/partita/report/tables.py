"""Comparison of methods: one row per label, with its spread over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from partita.record.metric import Metric
from partita.report.comments import caveats, explain_columns
from partita.report.comparison import Comparison, Difference, Gain, Line, Reach, Score, worse_share
from partita.report.load import (
    ReportError,
    RunRecord,
    by_label,
    clients,
    metric_of,
    number,
    personal,
    present,
    sent,
    tested,
)

GainsBySeed = Mapping[int, Mapping[str, float]]  # seed -> client -> gain
LOCAL_BASELINES = ("local-only", "coop")  # methods in which clients train and share nothing


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known values, or None if there are none."""
    known = present(values)
    return statistics.fmean(known) if known else None


def standard_deviation(values: Sequence[float | None]) -> float | None:
    """Return the sample standard deviation of the known values, or None for fewer than two."""
    known = present(values)
    return statistics.stdev(known) if len(known) > 1 else None


def compare(records: Sequence[RunRecord], target: float | None = None, metric: str | None = None) -> Comparison:
    """Compare labels, one line each in order of first appearance. The others are compared with the first.

    Args:
        records: The runs.
        target: Target of the column "rounds to". Default: 5% worse than the first label's mean final value.
        metric: Metric to compare. Default: the runs' own.
    """
    groups, chosen = by_label(records), metric_of(records, metric)
    metric = chosen.name
    finals = {label: {run.seed: _final(run, metric) for run in runs} for label, runs in groups.items()}
    first = next(iter(groups))
    asked = target
    if target is None and (reference := mean(list(finals[first].values()))) is not None:
        target = worse_share(chosen, reference) * reference
    differences = {
        label: paired_difference(_pairs(groups[first], runs, metric))
        for label, runs in groups.items()
        if label != first
    }
    if len(groups) > 2:
        differences = corrected(differences)
    gained, recorded = gains(groups, chosen), recorded_metrics(records)
    metrics = tuple(metric_of(records, name) for name in dict.fromkeys([metric, *recorded]))
    lines = tuple(
        _line(runs, finals[label], differences.get(label), gained.get(label, {}), target, chosen, recorded)
        for label, runs in groups.items()
    )
    comments = [
        *explain_columns(
            lines, target, asked is not None, metrics, local_baseline(groups), _largest_gap(records, metric)
        ),
        *caveats(groups, finals, differences, metric),
    ]
    return Comparison(metric, chosen.higher_is_better, target, lines, tuple(comments), metrics)


def _line(
    runs: list[RunRecord],
    finals: dict[int, float | None],
    difference: Difference | None,
    gained: GainsBySeed,
    target: float | None,
    metric: Metric,
    recorded: Sequence[str],
) -> Line:
    own = [present(personal(run, metric.name).values()) for run in runs]
    return Line(
        label=runs[0].label,
        seeds=tuple(finals),
        final=mean(list(finals.values())),
        final_sd=standard_deviation(list(finals.values())),
        stability=mean([_stability(run, metric.name) for run in runs]),
        personal=mean([mean(values) for values in own]),
        personal_sd=mean([standard_deviation(values) for values in own]),
        personal_worst=mean([worst_tenth(values, metric) for values in own]),
        gain=_gain(gained),
        difference=difference,
        up=mean([_bytes_per_client(run, "up") for run in runs]),
        down=mean([_bytes_per_client(run, "down") for run in runs]),
        total_mb=mean([_total(run) for run in runs]),
        reach=None if target is None else _reach(runs, target, metric),
        seconds=mean([mean([number(row.get("seconds")) for row in run.rows]) for run in runs]),
        epsilon=max((cost for run in runs if (cost := _epsilon(run)) is not None), default=None),
        scores={name: _score([_final(run, name) for run in runs]) for name in recorded},
    )


def _score(values: Sequence[float | None]) -> Score:
    return Score(mean(values), standard_deviation(values))


def recorded_metrics(records: Sequence[RunRecord]) -> list[str]:
    """Return the names of all metrics of the central test, in the order in which they were recorded."""
    return list(dict.fromkeys(name for record in records for row in record.rows for name in row.get("test") or ()))


def _epsilon(run: RunRecord) -> float | None:
    return number((run.rows[-1].get("privacy") or {}).get("epsilon"))


def _bytes_per_client(run: RunRecord, direction: str) -> float | None:
    """Return the bytes per client and round."""
    sizes, asked = sent(run, direction), sum(clients(row) for row in run.rows)
    return None if sizes is None or not asked else sum(sizes) / asked


def _total(run: RunRecord) -> float | None:
    up, down = sent(run, "up"), sent(run, "down")
    return None if up is None or down is None else (sum(up) + sum(down)) / 1e6


def _final(run: RunRecord, metric: str) -> float | None:
    """Return the value of the last tested round. If it is unknown, do not fall back to an earlier one."""
    values = tested(run, metric)
    return values[-1][1] if values else None


def _stability(run: RunRecord, metric: str) -> float | None:
    start = run.rows[-math.ceil(len(run.rows) / 4)]["round"]
    return standard_deviation([value for round, value in tested(run, metric) if round >= start])


def worst_tenth(values: Sequence[float], metric: Metric) -> float | None:
    """Return the mean of the worst tenth of the clients' `values`, at least one; `metric` says which are worse."""
    return mean(metric.worst_tenth(values))


def local_baseline(groups: Mapping[str, list[RunRecord]]) -> str | None:
    """Return the first label whose clients train alone."""
    return next((label for label, runs in groups.items() if _method(runs[0]) in LOCAL_BASELINES), None)


def _method(run: RunRecord) -> str | None:
    return (run.config.get("method") or {}).get("name")


def gains(groups: Mapping[str, list[RunRecord]], metric: Metric) -> dict[str, GainsBySeed]:
    """Return each client's gain over local training by label, common seed and client; empty if no run trains locally.

    Args:
        groups: The runs by label.
        metric: The metric. A gain is positive if the client is better off.
    """
    base = local_baseline(groups)
    if base is None:
        return {}
    sign = 1 if metric.higher_is_better else -1
    before = {run.seed: personal(run, metric.name) for run in groups[base]}
    by_label_and_seed = {
        label: {
            run.seed: {
                client: sign * (value - past)
                for client, value in personal(run, metric.name).items()
                if value is not None and (past := before[run.seed].get(client)) is not None
            }
            for run in runs
            if run.seed in before
        }
        for label, runs in groups.items()
        if label != base
    }
    return {label: seeds for label, seeds in by_label_and_seed.items() if any(seeds.values())}


def _gain(seeds: GainsBySeed) -> Gain | None:
    every = [value for clients_of_seed in seeds.values() for value in clients_of_seed.values()]
    return Gain(statistics.fmean(every), sum(value > 0 for value in every) / len(every)) if every else None


def _reach(runs: list[RunRecord], target: float, metric: Metric) -> Reach:
    def reached(value: float | None) -> bool:
        return value is not None and (value >= target if metric.higher_is_better else value <= target)

    late = [
        next((round + 1.0 for round, value in tested(run, metric.name) if reached(value)), math.inf) for run in runs
    ]
    return Reach(number(statistics.median(late)), sum(map(math.isfinite, late)), len(late))


def _largest_gap(records: Sequence[RunRecord], metric: str) -> int:
    """Return the most rounds from one test of a run to its next, or from its start to the first test."""
    rounds = [[-1, *(round for round, _ in tested(run, metric))] for run in records]
    return max((later - earlier for each in rounds for earlier, later in pairwise(each)), default=1)


def _pairs(first: list[RunRecord], runs: list[RunRecord], metric: str) -> list[tuple[float, float]]:
    """Return pairs of final values over common seeds, if both runs are finished or reached the same round."""
    pairs = []
    for one in first:
        for other in runs:
            before, after = _final(one, metric), _final(other, metric)
            if one.seed == other.seed and before is not None and after is not None and _comparable(one, other, metric):
                pairs.append((before, after))
    return pairs


def _comparable(one: RunRecord, other: RunRecord, metric: str) -> bool:
    return (one.finished and other.finished) or tested(one, metric)[-1][0] == tested(other, metric)[-1][0]


def paired_difference(pairs: Sequence[tuple[float, float]]) -> Difference:
    """Return the mean difference of pairs (before, after), with Student's 95% interval and the p of a paired t test.

    Args:
        pairs: One pair per seed. With fewer than two, nothing but their number is known.
    """
    if len(pairs) < 2:
        return Difference(len(pairs))
    gaps = [after - before for before, after in pairs]
    if max(gaps) - min(gaps) < 1e-12:
        # Equal gaps have zero variance: a t test would only measure float rounding.
        return Difference(len(pairs), statistics.fmean(gaps))
    try:
        from scipy import stats
    except ModuleNotFoundError as error:
        raise ReportError("paired tests need scipy; pip install 'partita[report]'") from error
    test = stats.ttest_rel([after for _, after in pairs], [before for before, _ in pairs])
    interval = test.confidence_interval(0.95)
    return Difference(len(pairs), statistics.fmean(gaps), float(interval.low), float(interval.high), float(test.pvalue))


def corrected(differences: Mapping[str, Difference]) -> dict[str, Difference]:
    """Return the differences with p-values corrected by Holm over those that have one."""
    tests = {label: difference.p for label, difference in differences.items() if difference.p is not None}
    by_holm = dict(zip(tests, holm(list(tests.values())), strict=True))
    return {label: replace(difference, p_holm=by_holm.get(label)) for label, difference in differences.items()}


def holm(p_values: Sequence[float]) -> list[float]:
    """Apply Holm's step-down correction. Keep the order."""
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = highest
    return corrected
