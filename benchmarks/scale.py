"""A round costs what its cohort costs: a million registered clients beside a thousand, in turn, round by round.

Each client's data is made when it is asked for; what clients keep lies on disk. Prints the ratio of the times of a
round, and how much memory the process holds after the first rounds and after the last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from environment import environment

from partita import FederationSettings, Key, Run, SimulationEngine, Training, methods, rounds
from partita.core.data import ClientData
from partita.core.optim import AdamW
from partita.core.rounds import RoundResult
from partita.data.client_ids import NumberedClients
from partita.engines.autotune import configure_backends
from partita.storage.client_store import DiskStore
from partita.testing.toy import ToyExamples, ToyTransformer

MEGABYTE = 1e6


class Registered:
    """So many clients of twenty examples, none of whom exists before it is asked."""

    def __init__(self, count: int) -> None:
        self.clients = NumberedClients(count)

    def __getitem__(self, client: str) -> ClientData:
        x = torch.randn(20, 4, 4, generator=(Key(3) / client).generator())
        part = ToyExamples(x, (x.sum((1, 2)) > 0).long())
        return ClientData(part, part, part)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--populations", nargs=2, type=int, default=[1_000, 1_000_000])
    options.add_argument("--cohort", type=int, default=100)
    options.add_argument("--rounds", type=int, default=100)
    options.add_argument("--methods", nargs="*", default=["fedavg", "local-only"])
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    onednn = configure_backends("auto")
    about = environment(
        torch.device("cpu"), onednn, f"{chosen.cohort} clients a round, {chosen.rounds} rounds, in blocks, a tiny model"
    )
    results = [measure(name, chosen.populations, chosen.cohort, chosen.rounds) for name in chosen.methods]
    few, many = (f"{count:,}" for count in chosen.populations)
    print(f"{about['work']}; {about['device']}, {about['threads']} threads, torch {about['torch']}")
    for row in results:
        print(
            f"{row['method']:12} {few}: {1000 * row['few']:.1f} ms a round   {many}: {1000 * row['many']:.1f} ms   "
            f"ratio {row['ratio']:.3f}   memory {row['early']:.0f} MB after a tenth, {row['late']:.0f} MB at the end"
        )
    if chosen.out:
        chosen.out.write_text(json.dumps({"environment": about, "results": results}, indent=1) + "\n")


def measure(name: str, populations: list[int], cohort: int, count: int) -> dict[str, float | str]:
    with tempfile.TemporaryDirectory() as folder:
        streams = [play(name, size, cohort, count, Path(folder) / str(size)) for size in populations]
        times: list[list[float]] = [[], []]
        held = []
        for _ in range(count):
            for place, stream in enumerate(streams):
                start = time.perf_counter()
                next(stream)
                times[place].append(time.perf_counter() - start)
            held.append(resident())
    few, many = (statistics.median(each[count // 10 :]) for each in times)
    early, late = held[count // 10], held[-1]
    return {"method": name, "few": few, "many": many, "ratio": many / few, "early": early, "late": late}


def play(name: str, population: int, cohort: int, count: int, folder: Path) -> Iterator[RoundResult]:
    training = Training(1e-2, AdamW(), batch_size=10)
    run = Run(
        methods.build(name), training, rounds=count, key=Key(0), federation=FederationSettings(cohort), drift=False
    )
    model, clients = ToyTransformer(), Registered(population)
    return rounds(run, model, SimulationEngine(run, model, clients, block=cohort, store=DiskStore(folder)))


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / MEGABYTE


if __name__ == "__main__":
    main()
