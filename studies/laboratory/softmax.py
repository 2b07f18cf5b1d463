"""Does the trade-off of bias and drift survive softmax attention? Both measured on a small ViT, as in the laboratory.

For a kernel (all query and key weights) as it was after some rounds of warm-up:
    bias    the pooled training loss after training all else centrally under that kernel, above the least of these
    drift   how far that loss rises when federated rounds of everything else start from the central solution
    excess  the pooled training loss after 30 federated rounds from the end of the warm-up, above the central one

    python studies/laboratory/softmax.py                 all shifts and seeds, then the table
    python studies/laboratory/softmax.py label 3         one shift and seed, written as a line of softmax.jsonl
    python studies/laboratory/softmax.py drift label 3   its drift alone, written as a line of softmax-drift.jsonl
    python studies/laboratory/softmax.py table           the table of what is written so far
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from partita import Key, Run, SimulationEngine, Training, data, methods, models, rounds, score
from partita.core.batch_schedule import shuffled_batches
from partita.core.data import Batch, ClientData, Examples
from partita.core.method import Method
from partita.core.model import Model
from partita.core.optim import AdamW
from partita.core.rounds import initial_server
from partita.core.server_rule import Server
from partita.core.tensors import Tensors

Numbers = NDArray[np.float64]
LINES = Path(__file__).with_name("softmax.jsonl")
DRIFTS = Path(__file__).with_name("softmax-drift.jsonl")
SHIFTS = ("none", "label", "feature")
SEEDS = range(5)
ROUNDS = 30
WARMUPS = (0, 3, 8, 15, 30)
DRIFTED = (0, 8, 30)  # of these, where drift is measured
FROZEN = methods.build("fedfrozen", {"warmup": 0})
TRAINING = Training(lr=1e-3, optimizer=AdamW(weight_decay=0.01), batch_size=32, epochs=2)


@dataclass(frozen=True)
class Turned:
    """Images turned by quarters and, from the fifth client on, mirrored: the labels stay alike, the inputs do not."""

    examples: Examples
    place: int

    def __len__(self) -> int:
        return len(self.examples)

    def take(self, indices: Tensor) -> Batch:
        batch = self.examples.take(indices)
        pixels = torch.rot90(batch.inputs["pixel_values"], self.place % 4, (-2, -1))
        if self.place % 8 >= 4:
            pixels = pixels.flip(-1)
        return Batch({**batch.inputs, "pixel_values": pixels.contiguous()}, batch.targets)


@dataclass(frozen=True)
class Joined:
    """Several sets as one."""

    parts: Sequence[Examples]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def take(self, indices: Tensor) -> Batch:
        ends = torch.tensor([len(part) for part in self.parts]).cumsum(0)
        owner = torch.searchsorted(ends, indices, right=True)
        batches = [
            part.take(indices[owner == number] - (ends[number] - len(part)))
            for number, part in enumerate(self.parts)
            if bool((owner == number).any())
        ]
        pixels = torch.cat([batch.inputs["pixel_values"] for batch in batches])
        return Batch({"pixel_values": pixels}, torch.cat([batch.targets for batch in batches]))


class Shifted:
    def __init__(self, federation: Any, shift: str) -> None:
        self.federation, self.shift, self.clients = federation, shift, federation.clients

    def __getitem__(self, client: str) -> ClientData:
        own = self.federation[client]
        if self.shift != "feature":
            return own
        place = list(self.clients).index(client)
        return ClientData(*(Turned(part, place) for part in (own.train, own.validation, own.test)))

    def pooled(self) -> Joined:
        return Joined([self[client].train for client in self.clients])

    def tested(self) -> Joined:
        """The central test set as clients see their inputs."""
        test = self.federation.test
        return Joined(
            [Turned(test, place) for place in range(len(self.clients))] if self.shift == "feature" else [test]
        )


def federated(
    method: Method, model: Model, people: Shifted, key: Key, start: Tensors | None, count: int
) -> list[Server]:
    run = Run(method, TRAINING, count, key, drift=False)
    server = initial_server(run, model)
    if start is not None:
        server = Server(start, server.state, server.versions)
    return [
        server,
        *(each.server for each in rounds(run, model, SimulationEngine(run, model, people, block=10), server)),
    ]


def central(model: Model, people: Shifted, key: Key, start: Tensors, epochs: int) -> Tensors:
    """AdamW on everybody's data, for all but the kernel."""
    kernel, pooled = model.names("query", "key"), people.pooled()
    live = {name: value.clone().requires_grad_() for name, value in start.items() if name not in kernel}
    held = {name: start[name] for name in kernel}
    optimizer = torch.optim.AdamW(list(live.values()), TRAINING.lr, weight_decay=0.01)
    training = Training(lr=TRAINING.lr, batch_size=TRAINING.batch_size, epochs=epochs)
    for indices in shuffled_batches(len(pooled), training, None, key / "central"):
        batch = pooled.take(indices)
        # Joined sorts a batch by owner, which changes nothing in its mean.
        loss = model.losses(model({**held, **live}, batch.inputs), batch.targets).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {**held, **{name: value.detach() for name, value in live.items()}}


def prepare(shift: str, seed: int) -> tuple[Key, Shifted, Model, list[Server]]:
    """The federation, and the server after each round of plain FedAvg."""
    key = Key(seed)
    task = data.load("digits", key / "data")
    how = {"kind": "dirichlet", "alpha": 0.1} if shift == "label" else {"kind": "iid"}
    people = Shifted(data.split(task, clients=10, key=key / "split", **how), shift)
    model = models.build("vit", task, key / "model", layers=2, width=64, heads=4, patch=4)
    return key, people, model, federated(methods.build("fedavg"), model, people, key, None, ROUNDS)


def measure(shift: str, seed: int) -> dict[str, Any]:
    key, people, model, path = prepare(shift, seed)
    found = []
    for warmup in WARMUPS:
        start = path[warmup].params
        alone = central(model, people, key, start, epochs=2 * ROUNDS)
        together = federated(FROZEN, model, people, key / "frozen", start, ROUNDS)
        stopped = together[ROUNDS - warmup]  # as many rounds in all as the others
        test = score(model, stopped.params, people.tested())
        found.append(
            {
                "warmup": warmup,
                "central": score(model, alone, people.pooled())["loss"],
                "federated": score(model, together[-1].params, people.pooled())["loss"],
                "test_loss": test["loss"],
                "accuracy": test["accuracy"],
            }
        )
    return {"shift": shift, "seed": seed, "found": found}


def measure_drift(shift: str, seed: int) -> dict[str, Any]:
    key, people, model, path = prepare(shift, seed)
    found = []
    for warmup in DRIFTED:
        alone = central(model, people, key, path[warmup].params, epochs=ROUNDS)
        rested = federated(FROZEN, model, people, key / "rest", alone, ROUNDS // 3)
        before, after = (score(model, each, people.pooled())["loss"] for each in (alone, rested[-1].params))
        found.append({"warmup": warmup, "central": before, "rested": after})
    return {"shift": shift, "seed": seed, "found": found}


def read(path: Path) -> dict[tuple[str, int], list[dict[str, Any]]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(each["shift"], each["seed"]): each["found"] for each in sorted(lines, key=lambda each: each["seed"])}


def column(found: dict[tuple[str, int], list[dict[str, Any]]], shift: str, warmup: int, name: str) -> Numbers:
    rows = [row for (own, _), rows in found.items() if own == shift for row in rows if row["warmup"] == warmup]
    return np.array([row[name] for row in rows])


def spread(values: Numbers, digits: int = 3) -> str:
    return f"{values.mean():.{digits}f} ± {values.std(ddof=1):.{digits}f}" if len(values) > 1 else "–"


def table() -> str:
    runs, drifts = read(LINES), read(DRIFTS)
    text = ["| shift | warm-up | bias | drift | excess | test accuracy, % | to never freezing, paired [95%] |"]
    text += ["| :-- | --: | --: | --: | --: | --: | --: |"]
    for shift in SHIFTS:
        never = 100 * column(runs, shift, ROUNDS, "accuracy")
        central = np.stack([column(runs, shift, warmup, "central") for warmup in WARMUPS])
        for place, warmup in enumerate(WARMUPS):
            drift = column(drifts, shift, warmup, "rested")
            away = 100 * column(runs, shift, warmup, "accuracy") - never
            low, high = stats.t.interval(0.95, len(away) - 1, away.mean(), stats.sem(away)) if away.any() else (0, 0)
            cells = [
                shift,
                str(warmup),
                spread(central[place] - central.min(0)),
                spread(drift - column(drifts, shift, warmup, "central")) if len(drift) else "",
                spread(column(runs, shift, warmup, "federated") - central[place]),
                spread(away + never, 1),
                f"{away.mean():+.1f} [{low:.1f}, {high:.1f}]" if away.any() else "–",
            ]
            text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def main() -> None:
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["table"]:
            print(table())
        case ["drift", shift, seed]:
            write(DRIFTS, measure_drift(shift, int(seed)))
        case [shift, seed]:
            write(LINES, measure(shift, int(seed)))
        case _:
            for shift in SHIFTS:
                for seed in SEEDS:
                    write(LINES, measure(shift, seed))
                    write(DRIFTS, measure_drift(shift, seed))
            print(table())


def write(path: Path, result: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(result) + "\n")
    print(f"{path.stem}, {result['shift']} shift, seed {result['seed']}: done", flush=True)


if __name__ == "__main__":
    main()
