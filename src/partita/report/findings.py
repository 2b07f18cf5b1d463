"""Three sentences at the top of a report: what was found, how sure one can be, and what it costs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from partita.record.metric import Metric, metric_named, short
from partita.report.comments import ONE_CLASS
from partita.report.comparison import Comparison, Difference, Line
from partita.report.load import RunRecord, by_label, settings

LEVEL = 0.05  # p values below this are called unlikely to be chance
FEW_SEEDS = 3  # with fewer, even a small p is weak evidence


def findings(records: Sequence[RunRecord], comparison: Comparison) -> tuple[str, str, str]:
    """Say what a comparison shows, how sure one can be of it, and what it costs.

    Args:
        records: The runs.
        comparison: Their comparison.

    Returns:
        One sentence each on the result, its certainty and its cost.
    """
    metric = metric_named(comparison.metric, comparison.metrics)
    ranked = _ranked(comparison.lines, metric)
    return (
        _result(comparison.lines, ranked, metric),
        _certainty(records, comparison.lines, ranked),
        _cost(comparison, ranked, metric),
    )


def _ranked(lines: Sequence[Line], metric: Metric) -> list[tuple[float, Line]]:
    """Return the lines with a value, best first. Of equal ones, the first label comes first."""
    known = [(line.final, line) for line in lines if line.final is not None]
    return sorted(known, key=lambda pair: -pair[0] if metric.higher_is_better else pair[0])


def _result(lines: Sequence[Line], ranked: Sequence[tuple[float, Line]], metric: Metric) -> str:
    if not ranked:
        return f"No run has {_a(metric)} in its last test: the value is missing or not a number."
    without = [line.label for line in lines if line.final is None]
    tail = f"; {_listed(without)} {_has(without)} none: the value is missing or not a number." if without else "."
    value, best = ranked[0]
    if len(ranked) == 1:
        spread = "" if best.final_sd is None else f" ± {metric.text(best.final_sd)}"
        return f"{best.label} reaches {_a(metric)} of {_shown(metric, value, spread)} on the central test set{tail}"
    tied = [line.label for other, line in ranked if other == value]
    if len(tied) > 1:
        return f"{_listed(tied)} share the best mean {metric.name}, {metric.show(value)}{tail}"
    first = lines[0]
    if first.final is None:
        return (
            f"{best.label} has the best mean {metric.name}, {metric.show(value)}, but there is nothing to compare it "
            f"with: differences are to {first.label}{tail}"
        )
    if best is not first:
        gap = _difference_text(metric, best.difference, first.final, value, f" than {first.label}")
        return f"{best.label} has the best mean {metric.name}, {metric.show(value)}: {gap}{tail}"
    other, second = ranked[1]
    gap = _difference_text(metric, second.difference, value, other)
    return (
        f"No label has a better mean {metric.name} than {first.label}, {metric.show(value)}; the next best is "
        f"{second.label}, {gap}{tail}"
    )


def _difference_text(metric: Metric, difference: Difference | None, first: float, value: float, than: str = "") -> str:
    """Say by how much a label is better or worse than the first one, with the interval if there is one.

    Args:
        metric: The metric.
        difference: The paired difference to the first label.
        first: The first label's value, for runs that cannot be paired.
        value: The label's value.
        than: The words after "better" or "worse".
    """
    sign = 1 if metric.higher_is_better else -1
    paired = difference is not None and difference.mean is not None
    mean = difference.mean if difference is not None and difference.mean is not None else value - first
    points = " points" if metric.fraction else ""
    amount = f"{metric.text(abs(mean))}{points}"
    amount = amount if re.search("[1-9]", amount) else "hardly"  # it would be 0.0
    told = f"{amount} {'better' if sign * mean > 0 else 'worse'}" if mean else "no better"
    told += than
    if not paired or difference is None or difference.low is None or difference.high is None:
        return told
    ends = sorted((sign * difference.low, sign * difference.high))
    return f"{told} (95% interval {metric.text(ends[0], '+')} to {metric.text(ends[1], '+')})"


def _certainty(records: Sequence[RunRecord], lines: Sequence[Line], ranked: Sequence[tuple[float, Line]]) -> str:
    if not ranked:
        return "So nothing can be said about any label; look at the alarms and the settings below."
    parts = [_alone(ranked[0][1])] if len(ranked) == 1 else _unlike(records) or [_chance(lines, ranked)]
    return _sentence([*parts, *_preliminary(records), *_constant(records)])


def _alone(line: Line) -> str:
    if len(line.seeds) == 1:
        return "this is one run with one seed, so nothing can be said about chance, and it is compared with no other"
    return (
        f"the spread is over {len(line.seeds)} seeds; it is compared with no other label, so this does not say "
        "whether it is a good value"
    )


def _chance(lines: Sequence[Line], ranked: Sequence[tuple[float, Line]]) -> str:
    first, best = lines[0], ranked[0][1]
    if first.final is None:
        return f"no difference was tested, because {first.label} has no value"
    if best is first and ranked[1][0] == ranked[0][0]:
        best = ranked[1][1]
    shown = ranked[1][1] if best is first else best
    difference = shown.difference or Difference(0)
    others = f"; only differences to {first.label} are tested" if len(ranked) > 2 else ""
    if difference.n < 2:
        if max(len(line.seeds) for line in lines) == 1:
            return (
                "there is one seed for each label, so nothing can be said about chance: the order may be another with "
                "the next seed"
            )
        return (
            f"nothing can be said about chance, because {_pairs(difference.n)} of {shown.label} and {first.label} can "
            "be compared, seed by seed"
        )
    over = f"n = {difference.n} seeds"
    p = difference.p if difference.p_holm is None else difference.p_holm
    if p is None:
        if not difference.mean:
            return f"the values of {shown.label} and {first.label} are the same for every seed ({over})"
        return f"the difference is the same for each of {difference.n} seeds, so there is no spread to test it against"
    corrected = "" if difference.p_holm is None else " after Holm's correction"
    told = f"p {_p(p)}{corrected}, paired t test over {over}"
    if p >= LEVEL:
        answer = f"the order could be chance ({told}): more seeds are needed to tell {shown.label} from {first.label}"
    elif difference.n < FEW_SEEDS:
        answer = f"the difference is unlikely to be chance ({told}), but {difference.n} seeds are few"
    else:
        answer = f"the difference is unlikely to be chance ({told})"
    return answer + others


def _unlike(records: Sequence[RunRecord]) -> list[str]:
    """Say if labels differ in what they are tested on, so that their scores cannot be compared."""
    flat = [settings(runs[0]) for runs in by_label(records).values()]
    keys = dict.fromkeys(key for values in flat for key in values)
    differing = [key for key in keys if len({values.get(key) for values in flat}) > 1]
    data = [key for key in differing if key.startswith("data.")]
    if data:
        return [f"the labels use different data ({_few(data)}), so their scores say nothing about the methods"]
    uneven = [key for key in differing if key.startswith("split.") or key in ("rounds", "federation.cohort")]
    if uneven:
        return [f"the labels differ in more than the method ({_few(uneven)}), so the comparison may not be fair"]
    return []


def _preliminary(records: Sequence[RunRecord]) -> list[str]:
    unfinished = sum(not record.finished for record in records)
    if not unfinished:
        return []
    runs = "run is" if len(records) == 1 else f"of {len(records)} runs {'is' if unfinished == 1 else 'are'}"
    count = "the" if len(records) == 1 else str(unfinished)
    return [f"{count} {runs} unfinished, so this is preliminary"]


def _constant(records: Sequence[RunRecord]) -> list[str]:
    """Say which labels end with a model that predicts one class."""
    labels = [
        label
        for label, runs in by_label(records).items()
        if any(
            ONE_CLASS in row.get("alarms", {})
            for run in runs
            for row in [row for row in run.rows if row.get("test")][-1:]
        )
    ]
    if not labels:
        return []
    return [
        f"the last model of {_listed(labels)} predicts one class, so its score only tells how frequent that class is"
    ]


def _cost(comparison: Comparison, ranked: Sequence[tuple[float, Line]], metric: Metric) -> str:
    lines = comparison.lines
    best = ranked[0][1] if ranked else lines[0]
    told = [*_other_metrics(comparison, best), _price(best, lines[0]), _worst(best, lines, metric)]
    return _sentence([text for text in told if text]) or "The cost was not recorded."


def _price(best: Line, first: Line) -> str:
    """Say what a run of the best label costs, and of the first label if that is another one."""
    facts = []
    if best.total_mb is not None:
        facts.append(f"sends {short(best.total_mb)} MB")
    if best.seconds is not None:
        facts.append(f"takes {short(best.seconds)} s per round")
    if best.epsilon is not None:
        facts.append(f"spends ε = {short(best.epsilon)}")
    if not facts:
        return ""
    told = f"a run of {best.label} {_listed(facts)}"
    if best is first or first.total_mb is None or best.total_mb is None or not first.total_mb:
        return told
    ratio = best.total_mb / first.total_mb
    same = abs(ratio - 1) < 0.005
    return f"{told}, {'as many' if same else f'{short(ratio)} times the'} bytes {'as' if same else 'of'} {first.label}"


def _worst(best: Line, lines: Sequence[Line], metric: Metric) -> str:
    """Say how the clients fare on their own test sets that fare worst."""
    known = [(line.personal_worst, line) for line in lines if line.personal_worst is not None]
    if not known:
        return ""
    value, kindest = sorted(known, key=lambda pair: -pair[0] if metric.higher_is_better else pair[0])[0]
    mean = "" if kindest.personal is None else f", against a mean of {metric.show(kindest.personal)}"
    if len(known) == 1 or kindest is best:
        most = "" if len(known) == 1 else ", the best of all labels"
        return f"the worst tenth of its clients reach {metric.show(value)} on their own test sets{mean}{most}"
    own = "" if best.personal_worst is None else f"; under {best.label} they reach {metric.show(best.personal_worst)}"
    return f"the worst tenth of clients fare best under {kindest.label}, {metric.show(value)}{own}"


def _other_metrics(comparison: Comparison, best: Line) -> list[str]:
    """Say by which other metrics another label is better than the best one."""
    better: dict[str, list[str]] = {}  # label -> metrics
    for name, score in best.scores.items():
        metric = metric_named(name, comparison.metrics)
        if name == comparison.metric or score.mean is None:
            continue
        known = [(line.scores[name].mean, line.label) for line in comparison.lines if name in line.scores]
        sign = 1 if metric.higher_is_better else -1
        top = max(((sign * value, label) for value, label in known if value is not None), key=lambda pair: pair[0])
        if top[0] > sign * score.mean:
            better.setdefault(top[1], []).append(name)
    if not better:
        return []
    told = _listed([f"{label} by {_listed(names)}" for label, names in better.items()])
    return [f"not all scores agree: best is {told}"]


def _sentence(parts: Sequence[str]) -> str:
    """Join parts, each of which starts with a word and not with a name."""
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _pairs(count: int) -> str:
    return "no pair of runs" if not count else "only one pair of runs"


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _few(names: Sequence[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _has(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"


def _a(metric: Metric) -> str:
    return f"{'an' if metric.name[0] in 'aeiou' else 'a'} {metric.name}"


def _shown(metric: Metric, value: float, spread: str) -> str:
    unit = "%" if metric.fraction else ""
    return f"{metric.text(value)}{spread}{unit}"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.3f}" if value < 0.1 else f"= {value:.2f}"
