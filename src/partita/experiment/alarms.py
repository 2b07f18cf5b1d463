"""Signs of trouble, from what the server sees of each round: choices of layers that have lost their point, updates far
beyond the others, and rounds that did not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from partita.core.model import Model, layer_of, number_of
from partita.core.rounds import Round
from partita.core.tensors import Names

SHORT, LONG = 3, 8  # rounds in a row that a sign must last: scores and senders, and layers that nobody chose
FLAT = 0.05  # scores of layers that differ by less than this part of the largest tell nothing
FEW = 3  # clients below whom a layer with one sender is no surprise, nor an update longer than the others
OUTLYING = 10.0  # times the round's median norm, from which an update is absurd; honest clients differ by less
NAMED = 5  # clients that an alarm names


@dataclass(frozen=True)
class Sight:
    """One round: by client, the layers that it sent, and the scores that it told of layers."""

    round: int
    sent: Mapping[str, Names]
    scores: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Alarm:
    kind: Literal["attention collapse", "layer starvation", "aggregation mismatch", "outlying update", "skipped round"]
    round: int
    text: str


def sight(each: Round, model: Model) -> Sight:
    """What to keep of a round: small, and without its tensors."""
    sent = {
        client: frozenset(layer for name in names if (layer := layer_of(model.tags[name])))
        for client, names in each.sent.items()
    }
    scores = {
        client: {layer: score for what, score in told.items() if (layer := what.partition("/")[2]).startswith("layer.")}
        for client, told in each.told.items()
    }
    return Sight(each.number, sent, {client: found for client, found in scores.items() if found})


def alarms_of_round(each: Round) -> list[Alarm]:
    """Those that one round raises by itself, whatever the method."""
    found = (_outlying(each), _skipped(each))
    return [alarm for alarm in found if alarm]


def _outlying(each: Round) -> Alarm | None:
    usual = median(each.norms.values()) if len(each.norms) >= FEW else 0.0
    far = {client: norm for client, norm in each.norms.items() if norm > OUTLYING * usual > 0}
    if not far:
        return None
    longest = sorted(far, key=lambda client: -far[client])
    shown = ", ".join(f"{client} ({far[client]:.3g})" for client in longest[:NAMED])
    shown += f" and {len(far) - NAMED} more" if len(far) > NAMED else ""
    text = (
        f"the update of {shown} is more than {OUTLYING:g} times as long as the round's median of {usual:.3g}; look at "
        "the client's data, or bound all updates with federation.max_norm"
    )
    return Alarm("outlying update", each.number, text)


def _skipped(each: Round) -> Alarm | None:
    if each.skipped is None:
        return None
    return Alarm("skipped round", each.number, f"{each.skipped}; the server stayed as it was")


def alarms(window: Sequence[Sight], layers: Sequence[str]) -> list[Alarm]:
    """Those that hold at the end of a window of rounds, oldest first, of which the last `LONG` are enough."""
    found = (_collapse(window), _starvation(window[-LONG:], layers), _mismatch(window[-SHORT:]))
    return [alarm for alarm in found if alarm]


def _collapse(window: Sequence[Sight]) -> Alarm | None:
    told = [each for each in window if each.scores][-SHORT:]
    if len(told) < SHORT:
        return None
    apart = [_spread(scores) for each in told for scores in each.scores.values()]
    if max(apart) >= FLAT:
        return None
    text = (
        f"no client's scores of its layers differed by more than {max(apart):.1%} in the last {SHORT} rounds that told "
        "any, so the choice is near to chance; choose other method.tokens, enlarge method.probe, or set "
        "method.select = 'gradient'"
    )
    return Alarm("attention collapse", window[-1].round, text)


def _spread(scores: Mapping[str, float]) -> float:
    largest = max(abs(score) for score in scores.values())
    return (max(scores.values()) - min(scores.values())) / largest if largest else 0.0


def _starvation(window: Sequence[Sight], layers: Sequence[str]) -> Alarm | None:
    if len(window) < LONG or not any(each.scores for each in window):
        return None  # without scores the choice is not the clients' own
    choices = [chosen for each in window for chosen in each.sent.values()]
    starved = sorted(set(layers).difference(*choices), key=number_of)
    if not starved or (2 * len(starved) < len(layers) and len(set(choices)) > 1):
        return None
    shown = ", ".join(str(number_of(layer)) for layer in starved[:8]) + (" ..." if len(starved) > 8 else "")
    text = (
        f"{len(starved)} of {len(layers)} layers ({shown}) were chosen by nobody in the last {LONG} rounds; see "
        "whether method.select = 'random' does as well, raise method.k, or give each its turn with 'round-robin'"
    )
    return Alarm("layer starvation", window[-1].round, text)


def _mismatch(window: Sequence[Sight]) -> Alarm | None:
    if len(window) < SHORT:
        return None
    alone = total = 0
    for each in window:
        senders = Counter(layer for chosen in each.sent.values() for layer in chosen)
        single = sum(count == 1 for count in senders.values())
        if len(each.sent) < FEW or 2 * single <= len(senders):
            return None
        alone, total = alone + single, total + len(senders)
    text = (
        f"of the layers sent in the last {SHORT} rounds, {alone} of {total} came from a single client, so they were "
        "not averaged; ask more clients a round with federation.cohort, raise method.k, or set method.over = 'cohort'"
    )
    return Alarm("aggregation mismatch", window[-1].round, text)
