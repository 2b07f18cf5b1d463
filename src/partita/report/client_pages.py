"""A page for each client inside the report: its scores by round, what it holds, and what happened to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from partita.record.metric import Metric
from partita.report.charts import thinned
from partita.report.load import Row, RunRecord, by_label, by_number, clients, number
from partita.report.render import size
from partita.report.split import frequent, splits
from partita.report.tables import mean

MAX_CLIENTS = 2000
MAX_VALUES = 150_000  # scores of all clients together
POINTS = (4, 60)  # of one curve, at least and at most
REASONS = 4  # reasons for lost rounds that are listed
ROUNDS_LISTED = 12


def clients_data(records: Sequence[RunRecord], metric: Metric) -> Mapping[str, Any] | None:
    """Return what the rows hold about each client, for `assets/clients.js`; None if they name no client."""
    groups = by_label(records)
    names = sorted({name for record in records for name in _named(record)}, key=by_number)
    if not names:
        return None
    shown = names[:MAX_CLIENTS]
    most = min(max(MAX_VALUES // (len(shown) * len(groups)), POINTS[0]), POINTS[1])
    held = _held(records)
    facts = {label: [_facts_by_client(run) for run in runs] for label, runs in groups.items()}
    scores = {label: [_scores(run, metric.name) for run in runs] for label, runs in groups.items()}
    listed = []
    for name in shown:
        lines = {label: _line([run.get(name, {}) for run in by_seed], most) for label, by_seed in scores.items()}
        listed.append(
            {
                "name": name,
                "holds": held.get(name, []),
                "lines": [
                    {"label": place, "x": line[0], "y": [None if y is None else metric.scale * y for y in line[1]]}
                    for place, line in enumerate(lines.values())
                    if line[0]
                ],
                "rows": [
                    [label, *_summed([run.get(name, {}) for run in by_seed])]
                    for label, by_seed in facts.items()
                    if any(name in run for run in by_seed)
                ],
            }
        )
    return {
        "script": {"clients": {"metric": metric.title_with_unit, "headings": HEADINGS, "list": listed}},
        "count": len(listed),
        "left": len(names) - len(shown),
        "several_seeds": any(len(runs) > 1 for runs in groups.values()),
    }


HEADINGS = ("label", "rounds asked", "rounds lost", "bytes up (mean of the round)", "layers chosen", "why lost")


def _named(record: RunRecord) -> set[str]:
    """Return the clients that a run names."""
    found = {client["name"] for client in record.split.get("clients", ())}
    for row in record.rows:
        found.update(row.get("cohort") or (), row.get("lost") or ())
        for by_client in (row.get("personal") or {}).values():
            found.update(by_client or ())
    return found


def _held(records: Sequence[RunRecord]) -> dict[str, list[str]]:
    """Return what each client holds, in words, once for each different split of the first seeds."""
    every = splits(records)
    held: dict[str, list[str]] = {}
    for split in every:
        for client in split.clients:
            whose = "" if len(every) == 1 else f"{', '.join(split.labels)}: "
            text = f"{whose}{client['train']} train, {client['validation']} validation, {client['test']} test examples"
            if split.classes:
                text += f"; labels in train: {frequent(client['labels'], split.classes)}"
            held.setdefault(client["name"], []).append(f"{text} (seed {split.seed})")
    return held


def _scores(run: RunRecord, metric: str) -> dict[str, dict[int, float | None]]:
    """Return the scores on clients' own test sets by client and number of completed rounds."""
    found: dict[str, dict[int, float | None]] = {}
    for row in run.rows:
        for client, value in ((row.get("personal") or {}).get(metric) or {}).items():
            found.setdefault(client, {})[row["round"] + 1] = number(value)
    return found


def _line(seeds: Sequence[Mapping[int, float | None]], most: int) -> tuple[list[int], list[float | None]]:
    """Return the rounds and the mean scores over seeds."""
    rounds = sorted({done for by_round in seeds for done in by_round})
    rounds = [rounds[place] for place in thinned(len(rounds), most)]
    return rounds, [mean([by_round.get(done) for by_round in seeds]) for done in rounds]


def _facts_by_client(run: RunRecord) -> dict[str, dict[str, Any]]:
    """Return how often each client was asked, lost and why, what it chose, and the mean bytes up of its rounds."""
    found: dict[str, dict[str, Any]] = {}
    for row in run.rows:
        lost = row.get("lost") or {}
        up = _mean_up(row)
        for client in {*(row.get("cohort") or ()), *lost}:
            own = found.setdefault(client, {"asked": 0, "lost": [], "up": 0.0, "layers": Counter()})
            own["asked"] += 1
            if client in lost:
                own["lost"].append((str(lost[client]), row["round"] + 1))
            elif up is not None:
                own["up"] += up
        for client, layers in (row.get("chosen") or {}).items():
            if client in found:
                found[client]["layers"].update(layers)
    return found


def _mean_up(row: Row) -> float | None:
    """Return the bytes up of a round for each client that answered. The rows do not say who sent how many."""
    total, answered = number((row.get("bytes") or {}).get("up")), clients(row) - len(row.get("lost") or ())
    return None if total is None or answered < 1 else total / answered


def _summed(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the cells of a client under a label, over all seeds."""
    known = [run for run in runs if run]
    lost = [each for run in known for each in run["lost"]]
    layers = sum((run["layers"] for run in known), Counter[str]())
    total = sum(layers.values())
    by_reason: dict[str, list[int]] = {}
    for reason, done in lost:
        by_reason.setdefault(reason, []).append(done)
    why = [
        f"{reason} (round {', '.join(map(str, sorted(set(rounds))[:ROUNDS_LISTED]))}"
        f"{' …' if len(set(rounds)) > ROUNDS_LISTED else ''})"
        for reason, rounds in list(by_reason.items())[:REASONS]
    ]
    chosen = ", ".join(
        f"{layer.removeprefix('layer.')} ({times})" for layer, times in sorted(layers.items(), key=_layer_key)
    )
    return [
        str(sum(run["asked"] for run in known)),
        str(len(lost)),
        size(sum(run["up"] for run in known)),
        chosen if total else "–",
        "; ".join(why) or "–",
    ]


def _layer_key(item: tuple[str, int]) -> list[tuple[int, str]]:
    return by_number(item[0])
