"""How the time of a round grows with the cohort, beside the bare loop, and with the population, for one cohort.

Times are the processors' own, so that what else the machine does weighs little.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from drive import SIZES, measure, show
from install import HOME

sys.path.append(str(Path(__file__).parents[1]))
from scale import play, resident

COHORTS, POPULATIONS = (10, 20, 40), (1_000, 10_000, 100_000, 1_000_000)
SIDES = ("bare", "partita", "partita, 2 workers")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=4, help="for each cohort")
    options.add_argument("--size", default="small")
    options.add_argument("--parts", nargs="*", choices=["cohort", "population"], default=["cohort", "population"])
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[str, Any] = json.loads(chosen.out.read_text()) if chosen.out and chosen.out.exists() else {}
    found["environment"] = {
        "device": platform.processor() or platform.machine(),
        "machine": "shared with other work; sides in turn, round by round; processor seconds, one thread a process",
        "work": "cohort: as in peers.json; population: 100 clients a round, FedAvg on a tiny model, in one block",
    }
    if "cohort" in chosen.parts:
        size = next(full for full in SIZES if full.split()[0] == chosen.size)
        found["cohort"] = [measure(size, clients, chosen.rounds, list(SIDES), HOME) for clients in COHORTS]
        for row in found["cohort"]:
            show(row)
    if "population" in chosen.parts:
        found["population"] = populate(100, 20)
        for row in found["population"]:
            milliseconds = 1000 * row["processor seconds"]
            print(f"{row['population']:>9,} clients: {milliseconds:.1f} ms, {row['megabytes']:.0f} MB")
    if chosen.out:
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")


def populate(cohort: int, count: int) -> list[dict[str, Any]]:
    """In turn, round by round; memory is that of all of them, when the one named has been added."""
    with tempfile.TemporaryDirectory() as folder:
        streams, held = [], []
        for size in POPULATIONS:
            streams.append(play("fedavg", size, cohort, count, Path(folder) / str(size)))
            next(streams[-1])  # the first warms up
            held.append(resident())
        times: list[list[float]] = [[] for _ in streams]
        for _ in range(count - 1):
            for stream, kept in zip(streams, times, strict=True):
                start = time.process_time()
                next(stream)
                kept.append(time.process_time() - start)
    return [
        {"population": size, "processor seconds": statistics.median(kept), "megabytes": memory}
        for size, kept, memory in zip(POPULATIONS, times, held, strict=True)
    ]


if __name__ == "__main__":
    main()
