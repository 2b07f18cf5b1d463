"""How prompts fare with more clients and more rounds, as Markdown tables.

    PYTHONPATH=src:studies python studies/prompts/clip/clients.py

`play.py table studies/prompts/clip/office-clients.toml` has the differences to promptfl. Here are those between two
settings of one method, and the scores by round. All are paired by seed.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from playing.choice import read_runs
from playing.lines import Line
from playing.study import read_study
from playing.tables import interval, p_text, paired_by_seed

from partita.record.metric import ACCURACY

STUDY = read_study(Path(__file__).with_name("office-clients.toml"))
RUNS = read_runs(STUDY, "run")
ARMS = ("promptfl", "pfeddc")
LONG, QUARTER = "12, 50 rounds", "48, a quarter each round"
BETWEEN = (("24", "12"), ("48", "12"), (QUARTER, "48"))
FAILED = 0.4  # accuracy below which a client counts as failed


def scores(arm: str, setting: str, place: int = -1) -> dict[int, float]:
    """Return by seed the mean accuracy on clients' own test parts, at one of the tested rounds."""
    return {line["seed"]: line["personal"]["accuracy"][place] for line in lines(arm, setting)}


def lines(arm: str, setting: str) -> list[Line]:
    """Return the runs of an arm in a setting, by seed."""
    own = [line for line in RUNS if (line["arm"], line["point"]["clients"]) == (arm, setting)]
    return sorted(own, key=lambda line: line["seed"])


def by_round() -> str:
    """Return a table of the accuracy by round, and of what the rounds after the 20th change."""
    rounds = lines(ARMS[0], LONG)[0]["personal"]["rounds"]
    table = [f"| accuracy after rounds, % | {' | '.join(map(str, rounds))} | 50 less 20 |", f"|---|{'--:|' * 6}"]
    for arm in ARMS:
        means = [statistics.fmean(scores(arm, LONG, place).values()) for place in range(len(rounds))]
        early, late = scores(arm, LONG, rounds.index(20)), scores(arm, LONG)
        gap = paired_by_seed(late, early)
        cells = [*(ACCURACY.text(mean) for mean in means), interval(gap, ACCURACY)]
        table.append(f"| `{arm}` | {' | '.join(cells)} |")
    return "\n".join(table)


def by_clients() -> str:
    """Return a table of the differences between two numbers of clients, by method."""
    table = ["| clients | method | points, paired [95%] | p |", "|---|---|--:|--:|"]
    for after, before in BETWEEN:
        for arm in ARMS:
            gap = paired_by_seed(scores(arm, after), scores(arm, before))
            table.append(f"| {after}, less {before} | `{arm}` | {interval(gap, ACCURACY)} | {p_text(gap.p)} |")
    return "\n".join(table)


def failed(arm: str, setting: str) -> tuple[int, int]:
    """Return how many clients failed, and how many there are, over all seeds."""
    own = [value for line in lines(arm, setting) for value in line["personal"]["clients"]["accuracy"].values()]
    return sum(value < FAILED for value in own), len(own)


def main() -> None:
    print(f"{by_round()}\n\n{by_clients()}\n")
    for setting in ("12", "24", "48", QUARTER):
        counts = ", ".join(f"{arm} {failed(arm, setting)[0]} of {failed(arm, setting)[1]}" for arm in ARMS)
        print(f"{setting}: clients below {100 * FAILED:.0f}%: {counts}")


if __name__ == "__main__":
    main()
