"""Signs of trouble, from what the server sees of each round: choices of layers that have lost their point, updates far
beyond the others, and rounds that did not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from partita.core.model import Model, layer_number, layer_tag
from partita.core.rounds import RoundResult
from partita.core.tensors import Names

SHORT_WINDOW, LONG_WINDOW = (
    3,
    8,
)  # rounds in a row that a sign must last: scores and senders, and layers that nobody chose
MIN_SPREAD = 0.05  # scores of layers that differ by less than this part of the largest tell nothing
MIN_SHARE = 3  # clients below whom a layer with one sender is no surprise, nor an update longer than the others
OUTLIER_RATIO = 10.0  # times the round's median norm, from which an update is absurd; honest clients differ by less
NAMED = 5  # clients that an alarm names


@dataclass(frozen=True)
class RoundSummary:
    """One round: by client, the layers that it sent, and the scores that it told of layers."""

    round: int
    sent: Mapping[str, Names]
    scores: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Alarm:
    kind: Literal["attention collapse", "layer starvation", "aggregation mismatch", "outlying update", "skipped round"]
    round: int
    text: str


def summarize(each: RoundResult, model: Model) -> RoundSummary:
    """What to keep of a round: small, and without its tensors."""
    sent = {
        client: frozenset(layer for name in names if (layer := layer_tag(model.tags[name])))
        for client, names in each.sent.items()
    }
    scores = {
        client: {
            layer: score for what, score in metrics.items() if (layer := what.partition("/")[2]).startswith("layer.")
        }
        for client, metrics in each.metrics.items()
    }
    return RoundSummary(each.number, sent, {client: found for client, found in scores.items() if found})


def check_round(each: RoundResult) -> list[Alarm]:
    """Those that one round raises by itself, whatever the method."""
    found = (_outlying(each), _skipped(each))
    return [alarm for alarm in found if alarm]


def _outlying(each: RoundResult) -> Alarm | None:
    usual = median(each.norms.values()) if len(each.norms) >= MIN_SHARE else 0.0
    far = {client: norm for client, norm in each.norms.items() if norm > OUTLIER_RATIO * usual > 0}
    if not far:
        return None
    longest = sorted(far, key=lambda client: -far[client])
    shown = ", ".join(f"{client} ({far[client]:.3g})" for client in longest[:NAMED])
    shown += f" and {len(far) - NAMED} more" if len(far) > NAMED else ""
    text = (
        f"the update of {shown} is more than {OUTLIER_RATIO:g} times as long as the round's median of {usual:.3g}; "
        "look at the client's data, or bound all updates with federation.max_norm"
    )
    return Alarm("outlying update", each.number, text)


def _skipped(each: RoundResult) -> Alarm | None:
    if each.skipped is None:
        return None
    return Alarm("skipped round", each.number, f"{each.skipped}; the server stayed as it was")


def check_window(window: Sequence[RoundSummary], layers: Sequence[str]) -> list[Alarm]:
    """Those that hold at the end of a window of rounds, oldest first, of which the last `LONG` are enough."""
    found = (_collapse(window), _starvation(window[-LONG_WINDOW:], layers), _mismatch(window[-SHORT_WINDOW:]))
    return [alarm for alarm in found if alarm]


def _collapse(window: Sequence[RoundSummary]) -> Alarm | None:
    metrics = [each for each in window if each.scores][-SHORT_WINDOW:]
    if len(metrics) < SHORT_WINDOW:
        return None
    apart = [_spread(scores) for each in metrics for scores in each.scores.values()]
    if max(apart) >= MIN_SPREAD:
        return None
    text = (
        f"no client's scores of its layers differed by more than {max(apart):.1%} in the last {SHORT_WINDOW} rounds "
        "that told any, so the choice is near to chance; choose other method.tokens, enlarge method.probe, or set "
        "method.select = 'gradient'"
    )
    return Alarm("attention collapse", window[-1].round, text)


def _spread(scores: Mapping[str, float]) -> float:
    largest = max(abs(score) for score in scores.values())
    return (max(scores.values()) - min(scores.values())) / largest if largest else 0.0


def _starvation(window: Sequence[RoundSummary], layers: Sequence[str]) -> Alarm | None:
    if len(window) < LONG_WINDOW or not any(each.scores for each in window):
        return None  # without scores the choice is not the clients' own
    choices = [chosen for each in window for chosen in each.sent.values()]
    starved = sorted(set(layers).difference(*choices), key=layer_number)
    if not starved or (2 * len(starved) < len(layers) and len(set(choices)) > 1):
        return None
    shown = ", ".join(str(layer_number(layer)) for layer in starved[:8]) + (" ..." if len(starved) > 8 else "")
    text = (
        f"{len(starved)} of {len(layers)} layers ({shown}) were chosen by nobody in the last {LONG_WINDOW} rounds; see "
        "whether method.select = 'random' does as well, raise method.k, or give each its turn with 'round-robin'"
    )
    return Alarm("layer starvation", window[-1].round, text)


def _mismatch(window: Sequence[RoundSummary]) -> Alarm | None:
    if len(window) < SHORT_WINDOW:
        return None
    alone = total = 0
    for each in window:
        senders = Counter(layer for chosen in each.sent.values() for layer in chosen)
        single = sum(count == 1 for count in senders.values())
        if len(each.sent) < MIN_SHARE or 2 * single <= len(senders):
            return None
        alone, total = alone + single, total + len(senders)
    text = (
        f"of the layers sent in the last {SHORT_WINDOW} rounds, {alone} of {total} came from a single client, so "
        "they were not averaged; ask more clients a round with federation.cohort, raise method.k, or set "
        "method.average_over = 'cohort'"
    )
    return Alarm("aggregation mismatch", window[-1].round, text)
