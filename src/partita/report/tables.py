"""The comparison of methods: one row for each label, with its spread over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
    settings,
    tested,
)
from partita.report.metric import Metric

LOCAL_BASELINES = ("local-only", "coop")  # methods of clients who learn and share nothing
WORST_SHARE = {
    True: 0.95,
    False: 1.05,
}  # of the first label's final mean: by higher_is_better, when it counts as reached


@dataclass(frozen=True)
class Difference:
    """This label − the first one, paired over `n` common seeds; the interval is the 95% one of Student's t."""

    n: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None  # given from three labels on


@dataclass(frozen=True)
class Reach:
    """The median counts a seed that did not reach the target as infinitely late; None: so late is the median."""

    rounds: float | None
    reached: int
    of: int


@dataclass(frozen=True)
class Gain:
    """What clients have of not learning alone, over clients and common seeds."""

    mean: float  # more is better, whatever the metric
    better: float  # a share of the clients


@dataclass(frozen=True)
class Line:
    """Values of the metric are as recorded, spread is the sample standard deviation, and None means not known."""

    label: str
    seeds: tuple[int, ...]
    final: float | None
    final_sd: float | None
    stability: float | None
    personal: float | None
    personal_sd: float | None  # over clients
    personal_worst: float | None
    gain: Gain | None  # None: nobody learnt alone, or it is they
    difference: Difference | None  # None in the first line
    up: float | None  # bytes a client-round
    down: float | None
    total_mb: float | None  # a run, both ways; 1 MB is 10^6 bytes
    reach: Reach | None
    seconds: float | None  # a round
    epsilon: float | None = None  # by the last round, of the most costly seed


@dataclass(frozen=True)
class Comparison:
    metric: str
    higher_is_better: bool
    target: float | None
    lines: tuple[Line, ...]
    comments: tuple[str, ...]


def mean(values: Sequence[float | None]) -> float | None:
    known = present(values)
    return statistics.fmean(known) if known else None


def standard_deviation(values: Sequence[float | None]) -> float | None:
    known = present(values)
    return statistics.stdev(known) if len(known) > 1 else None


def compare(records: Sequence[RunRecord], target: float | None = None, metric: str | None = None) -> Comparison:
    """One line for each label, in order of first appearance; the first is what the others are compared with.

    The target is by default 95% of the first label's mean final value, or 105% of it where less is better. The metric
    is that of the runs, unless another is named.
    """
    groups, judge = by_label(records), metric_of(records, metric)
    metric = judge.name
    finals = {label: {run.seed: _final(run, metric) for run in runs} for label, runs in groups.items()}
    first = next(iter(groups))
    asked = target
    if target is None and (reference := mean(list(finals[first].values()))) is not None:
        target = WORST_SHARE[judge.higher_is_better] * reference
    differences = {label: _difference(groups[first], runs, metric) for label, runs in groups.items() if label != first}
    if len(groups) > 2:
        differences = _corrected(differences)
    gained = gains(groups, judge)
    lines = tuple(
        _line(runs, finals[label], differences.get(label), gained.get(label, []), target, judge)
        for label, runs in groups.items()
    )
    comments = [
        *_meaning(lines, target, asked is not None, judge, local_baseline(groups)),
        *_reservations(groups, finals, differences, metric),
    ]
    return Comparison(metric, judge.higher_is_better, target, lines, tuple(comments))


def _line(
    runs: list[RunRecord],
    finals: dict[int, float | None],
    difference: Difference | None,
    gained: Sequence[Sequence[float]],
    target: float | None,
    judge: Metric,
) -> Line:
    metric = judge.name
    own = [present(personal(run, metric).values()) for run in runs]
    return Line(
        label=runs[0].label,
        seeds=tuple(finals),
        final=mean(list(finals.values())),
        final_sd=standard_deviation(list(finals.values())),
        stability=mean([_stability(run, metric) for run in runs]),
        personal=mean([mean(values) for values in own]),
        personal_sd=mean([standard_deviation(values) for values in own]),
        personal_worst=mean([worst_tenth(values, judge) for values in own]),
        gain=_gain(gained),
        difference=difference,
        up=mean([_each(run, "up") for run in runs]),
        down=mean([_each(run, "down") for run in runs]),
        total_mb=mean([_total(run) for run in runs]),
        reach=None if target is None else _reach(runs, target, judge),
        seconds=mean([mean([number(row.get("seconds")) for row in run.rows]) for run in runs]),
        epsilon=max((cost for run in runs if (cost := _epsilon(run)) is not None), default=None),
    )


def _epsilon(run: RunRecord) -> float | None:
    return number((run.rows[-1].get("privacy") or {}).get("epsilon"))


def _each(run: RunRecord, way: str) -> float | None:
    """Bytes a client-round."""
    sizes, asked = sent(run, way), sum(clients(row) for row in run.rows)
    return None if sizes is None or not asked else sum(sizes) / asked


def _total(run: RunRecord) -> float | None:
    up, down = sent(run, "up"), sent(run, "down")
    return None if up is None or down is None else (sum(up) + sum(down)) / 1e6


def _final(run: RunRecord, metric: str) -> float | None:
    """The last tested round's value, which may be unknown: an earlier one is not put in its place."""
    values = tested(run, metric)
    return values[-1][1] if values else None


def _stability(run: RunRecord, metric: str) -> float | None:
    start = run.rows[-math.ceil(len(run.rows) / 4)]["round"]
    return standard_deviation([value for round, value in tested(run, metric) if round >= start])


def worst_tenth(values: Sequence[float], judge: Metric) -> float | None:
    """The mean over the worst tenth of the clients, and over at least one."""
    return mean(sorted(values, reverse=not judge.higher_is_better)[: math.ceil(len(values) / 10)])


def local_baseline(groups: Mapping[str, list[RunRecord]]) -> str | None:
    """The first label whose clients learn alone."""
    return next((label for label, runs in groups.items() if _method(runs[0]) in LOCAL_BASELINES), None)


def _method(run: RunRecord) -> str | None:
    return (run.config.get("method") or {}).get("name")


def gains(groups: Mapping[str, list[RunRecord]], judge: Metric) -> dict[str, list[list[float]]]:
    """By label and common seed, how much better each client does than by learning alone."""
    base = local_baseline(groups)
    if base is None:
        return {}
    sign = 1 if judge.higher_is_better else -1
    before = {run.seed: personal(run, judge.name) for run in groups[base]}
    found: dict[str, list[list[float]]] = {}
    for label, runs in groups.items():
        if label == base:
            continue
        pairs = [(personal(run, judge.name), before[run.seed]) for run in runs if run.seed in before]
        found[label] = [
            present(_less(value, past.get(client), sign) for client, value in own.items()) for own, past in pairs
        ]
    return {label: seeds for label, seeds in found.items() if any(seeds)}


def _less(value: float | None, past: float | None, sign: int) -> float | None:
    return None if value is None or past is None else sign * (value - past)


def _gain(seeds: Sequence[Sequence[float]]) -> Gain | None:
    every = [value for seed in seeds for value in seed]
    return Gain(statistics.fmean(every), sum(value > 0 for value in every) / len(every)) if every else None


def _reach(runs: list[RunRecord], target: float, judge: Metric) -> Reach:
    def there(value: float | None) -> bool:
        return value is not None and (value >= target if judge.higher_is_better else value <= target)

    late = [next((round + 1.0 for round, value in tested(run, judge.name) if there(value)), math.inf) for run in runs]
    return Reach(number(statistics.median(late)), sum(map(math.isfinite, late)), len(late))


def _pairs(first: list[RunRecord], runs: list[RunRecord], metric: str) -> list[tuple[float, float]]:
    """The final values over common seeds, of runs that came equally far."""
    pairs = []
    for one in first:
        for other in runs:
            before, after = _final(one, metric), _final(other, metric)
            if one.seed == other.seed and before is not None and after is not None and _comparable(one, other, metric):
                pairs.append((before, after))
    return pairs


def _comparable(one: RunRecord, other: RunRecord, metric: str) -> bool:
    return (one.finished and other.finished) or tested(one, metric)[-1][0] == tested(other, metric)[-1][0]


def _difference(first: list[RunRecord], runs: list[RunRecord], metric: str) -> Difference:
    pairs = _pairs(first, runs, metric)
    if len(pairs) < 2:
        return Difference(len(pairs))
    gaps = [after - before for before, after in pairs]
    if max(gaps) - min(gaps) < 1e-12:
        # Equal gaps have no spread to test against; what would remain is the rounding of floats.
        return Difference(len(pairs), statistics.fmean(gaps))
    try:
        from scipy import stats
    except ModuleNotFoundError as error:
        raise ReportError("paired tests need scipy; pip install 'partita[report]'") from error
    test = stats.ttest_rel([after for _, after in pairs], [before for before, _ in pairs])
    interval = test.confidence_interval(0.95)
    return Difference(len(pairs), statistics.fmean(gaps), float(interval.low), float(interval.high), float(test.pvalue))


def _corrected(differences: dict[str, Difference]) -> dict[str, Difference]:
    tests = {label: each.p for label, each in differences.items() if each.p is not None}
    by_holm = dict(zip(tests, holm(list(tests.values())), strict=True))
    return {label: replace(each, p_holm=by_holm.get(label)) for label, each in differences.items()}


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction, in the order given."""
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = highest
    return corrected


def _meaning(lines: Sequence[Line], target: float | None, asked: bool, judge: Metric, base: str | None) -> list[str]:
    """What the columns say, for those columns that are there."""
    said = [
        f"{judge.name}: of the last tested round, mean ± sample standard deviation over seeds"
        f"{'' if judge.higher_is_better else '; lower is better'}.",
        "stability: standard deviation over the last quarter of the rounds, averaged over seeds; lower is steadier.",
    ]
    compared = [line.difference for line in lines if line.difference]
    if compared:
        counts = sorted({each.n for each in compared})
        over = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
        points = "in percentage points, " if judge.higher_is_better else ""
        said.append(
            f"difference: to {lines[0].label}, {points}paired over common seeds ({over}), "
            "with the 95% interval and p of a paired t test."
        )
    tests = [each for each in compared if each.p is not None]
    if any(each.p_holm is not None for each in tests):
        said.append(f"p: corrected by Holm for {len(tests)} comparisons; the intervals are not corrected.")
    elif tests:
        said.append("p: not corrected for many comparisons.")
    if any(line.personal is not None for line in lines):
        said.append(
            "personal: on each client's own test part; spread is the standard deviation over clients, worst tenth the "
            "mean over the worst 10% of them."
        )
    if any(line.gain for line in lines):
        said.append(
            f"gain: how much better a client does than under {base}, where it learns alone, mean over clients and "
            "common seeds; better off is the share of clients who gain."
        )
    if any(line.epsilon is not None for line in lines):
        said.append("ε: what training cost in privacy by the last round, of the seed in which it cost most.")
    said.append("client-round: one client asked in one round, whether or not it answered.")
    said.append("MB: sent both ways in a whole run, mean over seeds; 1 MB = 10⁶ bytes.")
    if target is not None:
        share = f"{WORST_SHARE[judge.higher_is_better]:.0%}"
        origin = "as asked" if asked else f"{share} of the final mean of {lines[0].label}"
        said.append(
            f"rounds to {judge.show(target)}: {origin}; the first round counts as 1, and in the median over seeds "
            "one that did not get there as infinitely late."
        )
    return said


def _reservations(
    groups: dict[str, list[RunRecord]],
    finals: dict[str, dict[int, float | None]],
    differences: dict[str, Difference],
    metric: str,
) -> list[str]:
    """What a reader must know before trusting a line."""
    first, said = next(iter(groups)), []
    for label, runs in groups.items():
        for run in runs:
            if not run.finished:
                so_far = f"{len(run.rows)} of {run.config.get('rounds', '?')} rounds"
                said.append(f"{label}, seed {run.seed}: unfinished ({so_far}); its last tested round is used.")
        known = [settings(run) for run in runs]
        if differing := [key for key in known[0] if any(each.get(key) != known[0][key] for each in known)]:
            said.append(
                f"{label}: its runs differ in more than the seed ({', '.join(differing)}); they are no repeats."
            )
        if unknown := [str(seed) for seed, value in finals[label].items() if value is None]:
            said.append(f"{label}: no final {metric} for seed {', '.join(unknown)}; left out of the mean.")
        own = [value for run in runs for value in personal(run, metric).values()]
        if None in own:
            said.append(f"{label}: {own.count(None)} of {len(own)} personal values are missing and left out.")
        if any(run.privacy.get("repeatable") for run in runs):
            said.append(f"{label}: anyone can recompute its noise from the seed, so its epsilon is a simulation.")
        if len(runs) == 1:
            said.append(f"{label}: one seed, so no spread over seeds.")
        if label != first:
            said += _paired_reservations(groups[first], runs, differences[label])
    return said


def _paired_reservations(first: list[RunRecord], runs: list[RunRecord], each: Difference) -> list[str]:
    label, said = runs[0].label, []
    common = len({run.seed for run in runs} & {run.seed for run in first})
    if each.n < common:
        said.append(
            f"{label}: {common - each.n} of {common} common seeds left out of the difference, "
            "since one run of the pair is behind or has no value."
        )
    if each.n < 2:
        said.append(
            f"{label}: no paired difference to {first[0].label}, which needs 2 pairs of runs; here n = {each.n}."
        )
    elif each.p is None:
        said.append(f"{label}: the same difference to {first[0].label} for every seed, so there is nothing to test.")
    return said
