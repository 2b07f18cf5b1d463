"""Layers that clients chose, the stability of these choices, and the alarms they raised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, groupby, pairwise
from statistics import fmean

from partita.record.metric import MISSING
from partita.report.charts import thinned
from partita.report.comments import ONE_CLASS
from partita.report.elements import HeatMap
from partita.report.load import Row, RunRecord, by_label
from partita.report.tables import mean

LAYER = "layer."
ROUNDS_DRAWN = 120  # columns of a picture by round


def has_selection(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Return the runs whose clients chose layers, by label."""
    selected = {label: [run for run in runs if _choices(run)] for label, runs in by_label(records).items()}
    return {label: runs for label, runs in selected.items() if runs}


def shares(runs: Sequence[RunRecord]) -> dict[int, dict[int, float]]:
    """Return the fraction of clients over all seeds that sent a layer, by layer and completed rounds."""
    sent: dict[int, dict[int, list[int]]] = {}
    layers = sorted(
        {int(layer.removeprefix(LAYER)) for run in runs for row in _choices(run) for layer in _layers_in(row)}
    )
    for run in runs:
        for row in _choices(run):
            for layer in layers:
                choices = [int(f"{LAYER}{layer}" in chosen) for chosen in row["chosen"].values()]
                sent.setdefault(layer, {}).setdefault(row["round"] + 1, []).extend(choices)
    return {layer: {done: fmean(choices) for done, choices in by.items() if choices} for layer, by in sent.items()}


def chooses_layers(runs: Sequence[RunRecord]) -> bool:
    """Return whether clients chose layers, so that they sent less than the plan allows."""
    return any(row.get("chosen") is not None for run in runs for row in run.rows)


def shares_sent(runs: Sequence[RunRecord], first: int, last: int) -> dict[str, float]:
    """Return how often layers and parameters were sent from round `first` to `last`, over all seeds.

    Returns:
        The fraction of clients and rounds for each layer, and the fraction of rounds for each parameter by name: of a
        parameter outside the layers it is only known whether any client sent it.
    """
    rows = [row for run in runs for row in run.rows if first <= row["round"] <= last]
    choices = [set(chosen) for row in rows for chosen in (row.get("chosen") or {}).values()]
    by_layer = Counter(layer for chosen in choices for layer in chosen)
    by_name = Counter(name for row in rows for name in row.get("up") or ())
    return {name: times / len(rows) for name, times in by_name.items()} | {
        layer: times / len(choices) for layer, times in by_layer.items()
    }


def overlap_between_rounds(runs: Sequence[RunRecord]) -> tuple[str, str]:
    """Return the mean Jaccard overlap of a client's choice with its previous one, and of two clients in a round."""
    over_rounds, over_clients = [], []
    for run in runs:
        rows = _choices(run)
        over_clients += [_overlap(one, two) for row in rows for one, two in combinations(row["chosen"].values(), 2)]
        for client in sorted({client for row in rows for client in row["chosen"]}):
            own = [row["chosen"][client] for row in rows if client in row["chosen"]]
            over_rounds += [_overlap(one, two) for one, two in pairwise(own)]
    return _percent(over_rounds), _percent(over_clients)


def alarms_raised(records: Sequence[RunRecord]) -> list[str]:
    """Return one line for each alarm of a label, with the seeds and rounds in which it lasted."""
    places: dict[tuple[str, str, str], list[str]] = {}  # (label, kind, text) -> seeds with rounds
    for label, runs in by_label(records).items():
        for run in runs:
            for kind in sorted({kind for row in run.rows for kind in row.get("alarms", {})}):
                by_text: dict[str, list[str]] = {}
                for rows in _series(run, kind):
                    by_text.setdefault(rows[-1]["alarms"][kind], []).append(_rounds(rows))
                for text, rounds in by_text.items():
                    places.setdefault((label, kind, text), []).append(f"seed {run.seed} in {', '.join(rounds)}")
    return [f"{label}, {kind}, {'; '.join(where)}: {text}." for (label, kind, text), where in places.items()]


def _series(run: RunRecord, kind: str) -> list[list[Row]]:
    """Return the series of rows in which an alarm lasted. The one on predictions is checked in tested rounds only."""
    checked = [row for row in run.rows if kind != ONE_CLASS or row.get("test")]
    return [list(rows) for raised, rows in groupby(checked, lambda row: kind in row.get("alarms", {})) if raised]


def _rounds(rows: Sequence[Row]) -> str:
    first, last = rows[0]["round"] + 1, rows[-1]["round"] + 1
    return f"round {first}" if first == last else f"rounds {first} to {last}"


def pictures(records: Sequence[RunRecord]) -> list[HeatMap]:
    """Return a picture for each label: which fraction of the clients sent each layer in each round."""
    found = []
    for place, (label, runs) in enumerate(has_selection(records).items()):
        by_layer = shares(runs)
        rounds = sorted({done for by_round in by_layer.values() for done in by_round})
        rounds = [rounds[at] for at in thinned(len(rounds), ROUNDS_DRAWN)]
        layers = sorted(by_layer, reverse=True)
        often = [f"layer {layer} {mean(list(by_layer[layer].values())) or 0:.0%}" for layer in sorted(by_layer)]
        found.append(
            HeatMap(
                "layers" if place == 0 else f"layers-{place + 1}",
                f"Layers that clients of {label} sent.",
                "Fraction of the round's clients, over all seeds, that chose a layer.",
                f"Over all rounds: {', '.join(often)}.",
                [f"layer {layer}" for layer in layers],
                [f"round {done}" for done in rounds],
                [[by_layer[layer].get(done) for done in rounds] for layer in layers],
            )
        )
    return found


def _choices(run: RunRecord) -> list[Row]:
    return [row for row in run.rows if row.get("chosen")]


def _layers_in(row: Row) -> set[str]:
    scored = {layer for scores in row.get("scores", {}).values() for layer in scores}
    return scored.union(*row["chosen"].values())


def _overlap(one: Sequence[str], two: Sequence[str]) -> float:
    return len(set(one) & set(two)) / len(set(one) | set(two)) if one or two else 1.0


def _percent(values: Sequence[float]) -> str:
    return f"{fmean(values):.0%}" if values else MISSING
