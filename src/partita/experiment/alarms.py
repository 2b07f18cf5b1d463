"""Alarms from what the server sees of each round.

They tell of uninformative layer choices, clients that choose different layers, outlying updates, skipped rounds, small
cohorts, and a model that predicts a single class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from partita.core.model import Model, layer_number, layer_tag
from partita.core.rounds import RoundResult
from partita.core.tensors import Names
from partita.evaluation import Evaluation

SHORT_WINDOW = 3  # consecutive rounds before an alarm on scores or on the number of senders per layer
LONG_WINDOW = 8  # consecutive rounds before an alarm on layers that no client chose
MIN_SPREAD = 0.05  # layer scores are uninformative if their range is below this fraction of the largest
MIN_SHARE = 3  # with fewer clients, a layer with one sender or an update with a large norm is not suspicious
OUTLIER_RATIO = 10.0  # an update is an outlier above this multiple of the median norm; honest clients stay below it
FIRST_TEST = 5  # rounds before an alarm on predictions: a model with a new head often predicts one class at first
NAMED = 5  # maximum number of clients named in an alarm


@dataclass(frozen=True)
class RoundSummary:
    """What the window checks need to know of one round."""

    round: int
    sent: Mapping[str, Names]  # client -> layers that it sent
    scores: Mapping[str, Mapping[str, float]]  # client -> layer -> score that it reported


@dataclass(frozen=True)
class Alarm:
    """A sign of trouble in a round, with a suggested remedy in `text`."""

    kind: Literal[
        "attention collapse",
        "layer starvation",
        "aggregation mismatch",
        "layer disagreement",
        "outlying update",
        "skipped round",
        "one predicted class",
        "small cohort",
    ]
    round: int
    text: str


def summarize(result: RoundResult, model: Model) -> RoundSummary:
    """Summarize a round without keeping its tensors."""
    sent = {
        client: frozenset(layer for name in names if (layer := layer_tag(model.tags[name])))
        for client, names in result.sent.items()
    }
    scores = {
        client: {
            layer: score for what, score in metrics.items() if (layer := what.partition("/")[2]).startswith("layer.")
        }
        for client, metrics in result.metrics.items()
    }
    return RoundSummary(result.number, sent, {client: by_layer for client, by_layer in scores.items() if by_layer})


def check_round(result: RoundResult, wanted: int) -> list[Alarm]:
    """Return the alarms of a single round. They apply to every method.

    Args:
        result: The round's result.
        wanted: The number of clients that should have been asked.
    """
    alarms = (_outlying(result), _skipped(result), _small_cohort(result, wanted))
    return [alarm for alarm in alarms if alarm]


def _small_cohort(result: RoundResult, wanted: int) -> Alarm | None:
    asked = len(result.cohort)
    if asked >= wanted:
        return None
    text = f"only {asked} of {wanted} clients were asked, because no more were available; all of them were asked"
    return Alarm("small cohort", result.number, text)


def _outlying(result: RoundResult) -> Alarm | None:
    typical = median(result.norms.values()) if len(result.norms) >= MIN_SHARE else 0.0
    outliers = {client: norm for client, norm in result.norms.items() if norm > OUTLIER_RATIO * typical > 0}
    if not outliers:
        return None
    longest = sorted(outliers, key=lambda client: -outliers[client])
    shown = ", ".join(f"{client} ({outliers[client]:.3g})" for client in longest[:NAMED])
    shown += f" and {len(outliers) - NAMED} more" if len(outliers) > NAMED else ""
    text = (
        f"the update norm of {shown} is more than {OUTLIER_RATIO:g} times the round's median of {typical:.3g}; "
        "check the client's data, or clip all updates with federation.max_norm"
    )
    return Alarm("outlying update", result.number, text)


def _skipped(result: RoundResult) -> Alarm | None:
    if result.skipped is None:
        return None
    return Alarm("skipped round", result.number, f"{result.skipped}; the server state did not change")


def check_test(round: int, tested: Evaluation, classes: Sequence[str]) -> list[Alarm]:
    """Return the alarm of a model that predicts the same class for the whole central test set.

    Args:
        round: Number of the round.
        tested: The evaluation on the central test set.
        classes: Names of the classes.
    """
    if tested.constant is None or round + 1 < FIRST_TEST:
        return []
    shown = " and ".join(f"'{classes[place]}'" for place in tested.constant[:NAMED])
    shown += f" and {len(tested.constant) - NAMED} more" if len(tested.constant) > NAMED else ""
    text = (
        f"the model predicts {shown or 'no label'} for the whole test set, so its scores only tell how frequent that "
        "is; train for more rounds or steps, change training.lr, or check the clients' labels"
    )
    return [Alarm("one predicted class", round, text)]


def check_window(window: Sequence[RoundSummary], layers: Sequence[str]) -> list[Alarm]:
    """Return the alarms on clients' layer choices at the end of a window of rounds.

    Args:
        window: Summaries, oldest first. The last `LONG_WINDOW` rounds are enough.
        layers: All layers of the model.
    """
    last = window[-SHORT_WINDOW:]
    apart = _mismatch(last) or _disagreement(last, layers)  # the first is the stronger form of the second
    alarms = (_collapse(window), _starvation(window[-LONG_WINDOW:], layers), apart)
    return [alarm for alarm in alarms if alarm]


def _collapse(window: Sequence[RoundSummary]) -> Alarm | None:
    scored = [summary for summary in window if summary.scores][-SHORT_WINDOW:]
    if len(scored) < SHORT_WINDOW:
        return None
    spreads = [_spread(scores) for summary in scored for scores in summary.scores.values()]
    if max(spreads) >= MIN_SPREAD:
        return None
    text = (
        f"no client's layer scores differed by more than {max(spreads):.1%} in the last {SHORT_WINDOW} rounds "
        "with scores, so the choice of layers is nearly random; choose other method.tokens, increase method.probe, or "
        "set method.select = 'gradient'"
    )
    return Alarm("attention collapse", window[-1].round, text)


def _spread(scores: Mapping[str, float]) -> float:
    largest = max(abs(score) for score in scores.values())
    return (max(scores.values()) - min(scores.values())) / largest if largest else 0.0


def _starvation(window: Sequence[RoundSummary], layers: Sequence[str]) -> Alarm | None:
    if len(window) < LONG_WINDOW or not any(summary.scores for summary in window):
        return None  # without scores, the clients did not choose the layers themselves
    choices = [chosen for summary in window for chosen in summary.sent.values()]
    starved = sorted(set(layers).difference(*choices), key=layer_number)
    if not starved or (2 * len(starved) < len(layers) and len(set(choices)) > 1):
        return None
    shown = ", ".join(str(layer_number(layer)) for layer in starved[:8]) + (" ..." if len(starved) > 8 else "")
    text = (
        f"{len(starved)} of {len(layers)} layers ({shown}) were chosen by no client in the last {LONG_WINDOW} rounds; "
        "check whether method.select = 'random' does as well, increase method.k, or take turns with 'round-robin'"
    )
    return Alarm("layer starvation", window[-1].round, text)


def _mismatch(window: Sequence[RoundSummary]) -> Alarm | None:
    if len(window) < SHORT_WINDOW:
        return None
    alone = total = 0
    for summary in window:
        senders = Counter(layer for chosen in summary.sent.values() for layer in chosen)
        single = sum(count == 1 for count in senders.values())
        if len(summary.sent) < MIN_SHARE or 2 * single <= len(senders):
            return None
        alone, total = alone + single, total + len(senders)
    text = (
        f"of the layers sent in the last {SHORT_WINDOW} rounds, {alone} of {total} came from a single client, so "
        "they were not averaged; increase federation.cohort, increase method.k, or set "
        "method.average_over = 'cohort'"
    )
    return Alarm("aggregation mismatch", window[-1].round, text)


def _disagreement(window: Sequence[RoundSummary], layers: Sequence[str]) -> Alarm | None:
    """Return an alarm if clients' own choices are closer to random draws than to one common choice.

    Two random draws of k of n layers share k / n of their layers, and equal choices share all. Clients that trained
    different layers lost 5 to 18 points in studies/safl2, more than the choice itself was worth.
    """
    if len(window) < SHORT_WINDOW:
        return None
    shares = []
    for summary in window:
        choices = list(summary.sent.values())
        if len(choices) < MIN_SHARE or not summary.scores or not all(choices):
            return None
        by_chance = fmean(map(len, choices)) / len(layers)
        shares.append(_common_share(choices))
        if shares[-1] >= (1 + by_chance) / 2:
            return None
    text = (
        f"two clients had only {fmean(shares):.0%} of their layers in common in the last {SHORT_WINDOW} rounds, so "
        "each layer was averaged over few clients; set method.agree = 'scores' to train the same layers everywhere, or "
        "use more examples to choose by, with method.probe"
    )
    return Alarm("layer disagreement", window[-1].round, text)


def _common_share(choices: Sequence[Names]) -> float:
    """Return how many layers two clients share, relative to the smaller choice, over all pairs of clients."""
    senders = Counter(layer for chosen in choices for layer in chosen)
    shared = sum(count * (count - 1) // 2 for count in senders.values())
    sizes = sorted(map(len, choices))
    return shared / sum(size * (len(sizes) - 1 - place) for place, size in enumerate(sizes))
