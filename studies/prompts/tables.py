"""The tables of README.md from lines of runs.

python studies/prompts/tables.py studies/prompts/office.jsonl --study methods --alone coop
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

Runs = dict[int, dict[str, Any]]  # by seed


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("file", type=Path)
    options.add_argument("--study", default="methods")
    options.add_argument("--alone", default="coop", help="the method that others' gains are over")
    options.add_argument("--against", default="pfeddc", help="the method that differences are to")
    options.add_argument("--rounds", action="store_true", help="own accuracy by round instead")
    chosen = options.parse_args()
    lines = [json.loads(line) for line in chosen.file.read_text().splitlines()]
    methods: dict[str, Runs] = {}
    for line in lines:
        if line["study"] == chosen.study:
            methods.setdefault(line["method"], {})[line["seed"]] = line
    if not methods:
        options.error(f"no study '{chosen.study}'; there are {', '.join(sorted({line['study'] for line in lines}))}")
    best_first = sorted(methods, key=lambda name: -own(methods[name]).mean())
    for name in best_first:
        if chosen.rounds:
            print(f"| {name} | {' | '.join(by_round(methods[name]))} |")
        else:
            print(row(name, methods[name], methods.get(chosen.alone), methods.get(chosen.against)))


def row(name: str, runs: Runs, alone: Runs | None, against: Runs | None) -> str:
    last = list(runs.values())
    clients = [np.array(list(each["own"].values())) for each in last]
    spread, worst = np.mean([each.std(ddof=1) for each in clients]), np.mean([each.min() for each in clients])
    everywhere = np.array([each["all"] for each in last])
    cells = [
        name,
        "–" if name == "zero-shot" else str(last[0]["lr"]),
        shown(own(runs)),
        f"{100 * spread:.0f}",
        f"{100 * worst:.0f}",
        gain(runs, alone),
        shown(everywhere),
        f"{last[0]['bytes_up']:,}",
        f"{len(last)} seeds",
        difference(runs, against),
    ]
    return f"| {' | '.join(cells)} |"


def own(runs: Runs) -> np.ndarray:
    """(seed,) each run's mean over clients."""
    return np.array([np.mean(list(run["own"].values())) for run in runs.values()])


def shown(values: np.ndarray) -> str:
    return f"{100 * values.mean():.1f} ± {100 * values.std(ddof=1):.1f}"


def gain(runs: Runs, alone: Runs | None) -> str:
    """Over learning alone: the mean over clients, and how many are better off."""
    if alone is None or alone is runs:
        return "–"
    each = [run["own"][client] - value for seed, run in runs.items() for client, value in alone[seed]["own"].items()]
    return f"{100 * np.mean(each):+.1f}, {100 * np.mean(np.array(each) > 0):.0f}%"


def difference(runs: Runs, against: Runs | None) -> str:
    """Paired over seeds, with its 95% interval."""
    if against is None or against is runs:
        return "–"
    seeds = sorted(runs.keys() & against.keys())
    pairs = own({seed: runs[seed] for seed in seeds}) - own({seed: against[seed] for seed in seeds})
    half = stats.t.ppf(0.975, len(pairs) - 1) * pairs.std(ddof=1) / len(pairs) ** 0.5
    return f"{100 * pairs.mean():+.1f} [{100 * (pairs.mean() - half):.1f}, {100 * (pairs.mean() + half):.1f}]"


def by_round(runs: Runs) -> list[str]:
    asked = list(next(iter(runs.values()))["own mean by round"])
    return [f"{done}: " + shown(np.array([run["own mean by round"][done] for run in runs.values()])) for done in asked]


if __name__ == "__main__":
    main()
