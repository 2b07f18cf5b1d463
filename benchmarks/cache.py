"""Rounds of FedAvg on a ViT whose lowest layers are frozen, with engine.cache_frozen and without it.

Prints ratios from one run: absolute times depend on the machine. On a CPU, they are the processor's own, of one thread,
so that what else the machine does weighs little. The time with the cache includes filling it, in the first round. Both
sides must reach the same tensors, or the comparison is void.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from environment import environment, now

from partita import Key, Model, Run, SimulationEngine, Training, data, methods, models, rounds
from partita.core.data import Population
from partita.core.optim import AdamW
from partita.core.tensors import Tensors
from partita.engines.autotune import configure_backends
from partita.models.frozen_cache import cache_frozen

CLIENTS, EXAMPLES, BATCH, ROUNDS = 4, 256, 32, 5
LAYERS, WIDTH, PIXELS, PATCH = 6, 192, 32, 8


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--repeats", type=int, default=1)
    options.add_argument("--frozen", type=int, nargs="*", default=[2, 4, 6], help="how many of the lowest layers")
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    device = torch.device(chosen.device)
    torch.set_num_threads(1)
    onednn = configure_backends("auto")
    results = [measure(depth, device, chosen.repeats) for depth in chosen.frozen]
    about = environment(
        device,
        onednn,
        f"{ROUNDS} rounds of {CLIENTS} clients x {EXAMPLES // CLIENTS} images x 1 epoch of AdamW, batch "
        f"{BATCH}; ViT of {LAYERS} layers, width {WIDTH}, {(PIXELS // PATCH) ** 2 + 1} tokens; median of "
        f"{chosen.repeats}, sides in turn",
    )
    print(f"{about['work']}; {about['device']}, {about['threads']} thread, torch {about['torch']}")
    print(f"{'frozen layers':14} {'without':>10} {'with':>10} {'ratio':>8} {'later rounds':>13} {'difference':>11}")
    for row in results:
        print(
            f"{row['frozen']:>5} of {LAYERS:<5} {row['without']:>8.2f} s {row['with']:>8.2f} s"
            f" {row['without'] / row['with']:>7.2f}x {row['without later'] / row['with later']:>12.2f}x"
            f" {row['difference']:>11.0e}"
        )
    print("a ratio above 1 is faster with the cache")
    if chosen.out:
        chosen.out.write_text(json.dumps({"environment": about, "results": results}, indent=1) + "\n")


def measure(depth: int, device: torch.device, repeats: int) -> dict[str, float]:
    key = Key(0)
    task = data.load("synthetic", key, examples=EXAMPLES, size=PIXELS, channels=3)
    federation = data.split(task, "iid", clients=CLIENTS, key=key)
    frozen = ("embedding", *(f"layer.{layer}" for layer in range(depth)))
    model = models.build("vit", task, key, layers=LAYERS, width=WIDTH, patch=PATCH, frozen=frozen)
    times: dict[str, list[list[float]]] = {"without": [], "with": []}
    results: dict[str, Tensors] = {}
    for _ in range(repeats):
        for side, kept in times.items():
            start, given, population = now(device), model, federation
            if side == "with":
                given, (train,) = cache_frozen(model, task.train)
                population = replace(federation, task=replace(task, train=train))
            seconds, results[side] = play(given, population, device, start)
            kept.append(seconds)
    # Without the key biases: softmax cannot feel them, so AdamW moves them by rounding alone (docs/decisions/0004).
    felt = [name for name in model.initial if "k_proj.bias" not in name]
    pairs = [(results["without"][name], results["with"][name]) for name in felt]
    difference = max(float((plain - cached).abs().max() / plain.abs().max()) for plain, cached in pairs)
    if difference > 1e-3:
        raise SystemExit(f"{depth} frozen layers: the sides differ by {difference:.1e}; the comparison is void")
    row = {"frozen": depth, "difference": difference}
    for side, kept in times.items():
        row[side] = statistics.median(sum(seconds) for seconds in kept)
        row[f"{side} later"] = statistics.median(sum(seconds[1:]) for seconds in kept)
    return row


def play(model: Model, population: Population, device: torch.device, start: float) -> tuple[list[float], Tensors]:
    """The seconds of each round, the first from when the side began, and the final tensors."""
    run = Run(methods.build("fedavg"), Training(1e-3, AdamW(), batch_size=BATCH), rounds=ROUNDS, key=Key(0))
    seconds: list[float] = []
    for each in rounds(run, model, SimulationEngine(run, model, population, device=device)):
        seconds.append(now(device) - start)
        start = now(device)
        params = each.server.params
    return seconds, params


if __name__ == "__main__":
    main()
