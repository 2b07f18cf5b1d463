"""Say where in the model clients chose their layers, and how often they disagreed or changed them, as Markdown.

    PYTHONPATH=src:studies python studies/safl2/choices.py maccrobat

`play.py layers` has a column for each layer, which are 30 for SmolLM2.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean

from playing.choice import read_runs
from playing.lines import Line
from playing.study import read_study

Round = Mapping[str, frozenset[int]]  # the layers of each client


@dataclass(frozen=True)
class Choices:
    """What the clients of one arm chose, over all rounds and seeds.

    Attributes:
        layer: The mean layer; layer 0 is next to the input.
        thirds: The shares of the lower, the middle and the upper third of the model in what was chosen.
        differ: The share of rounds in which clients differ.
        shared: How many layers two clients of a round have in common, in the mean.
        change: The share of clients and rounds after the first in which a client's layers change.
        kept: How many layers a client keeps from its round before, in the mean.
    """

    layer: float
    thirds: tuple[float, float, float]
    differ: float
    shared: float
    change: float
    kept: float


def rounds(line: Line) -> list[Round]:
    """Return the layers of each client in each round of a run."""
    return [
        {client: frozenset(int(layer.removeprefix("layer.")) for layer in chosen) for client, chosen in row.items()}
        for row in line.get("layers") or ()
    ]


def choices(runs: Iterable[Sequence[Round]], depth: int) -> Choices:
    """Summarize what clients chose.

    Args:
        runs: The rounds of each run.
        depth: How many layers the model has.
    """
    runs = list(runs)
    every = [row for run in runs for row in run]
    chosen = [layer for row in every for layers in row.values() for layer in layers]
    times = [3 * layer // depth for layer in chosen]
    after = [
        (before[client], layers)
        for run in runs
        for before, row in pairwise(run)
        for client, layers in row.items()
        if client in before
    ]
    return Choices(
        fmean(chosen),
        (times.count(0) / len(times), times.count(1) / len(times), times.count(2) / len(times)),
        fmean(len(set(row.values())) > 1 for row in every),
        fmean(len(one & other) for row in every for one, other in combinations(row.values(), 2)),
        fmean(old != new for old, new in after),
        fmean(len(old & new) for old, new in after),
    )


def by_arm(arms: Iterable[str], lines: Sequence[Line], depth: int) -> dict[str, Choices]:
    """Return the choices of each arm whose clients choose layers, in the order of `arms`."""
    runs = {arm: [rounds(line) for line in lines if line["arm"] == arm and line.get("layers")] for arm in arms}
    return {arm: choices(own, depth) for arm, own in runs.items() if own}


def table(found: Mapping[str, Choices]) -> str:
    """Return a table with a row for each arm."""
    head = ["", "mean layer", "lower third, %", "middle, %", "upper, %", "clients differ, % of rounds"]
    head += ["two clients share", "a client's layers change, % of rounds", "it keeps"]
    text = [head, ["---", *["--:"] * (len(head) - 1)]]
    for arm, own in found.items():
        cells = [f"{own.layer:.1f}", *(f"{100 * third:.0f}" for third in own.thirds), f"{100 * own.differ:.0f}"]
        text.append([f"`{arm}`", *cells, f"{own.shared:.1f}", f"{100 * own.change:.0f}", f"{own.kept:.1f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in text)


DEPTHS = {"pairs": 6, "maccrobat": 30, "ohsumed": 30, "maccrobat-rates": 30}  # layers of each study's model


def main() -> None:
    for name in sys.argv[1:] or DEPTHS:
        study = read_study(Path(__file__).with_name(f"{name}.toml"))
        print(f"{name}:\n\n{table(by_arm(study.arms, read_runs(study, 'run'), DEPTHS[name]))}\n")


if __name__ == "__main__":
    main()
