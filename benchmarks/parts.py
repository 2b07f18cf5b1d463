"""What training fewer parts saves: a round of FedFrozen's two stages, of SAFL and of layer-skipping beside FedAvg's.

All sides in turn in one run, the same clients and batches. Prints the time of FedAvg's round as a multiple of each
one's: what a plan does not train gets no gradient, and the backward pass stops at the lowest layer that trains.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from environment import environment, now

from partita import Key, Run, SimulationEngine, Training, data, methods, models
from partita.core.optim import AdamW
from partita.core.rounds import initial_server, rounds
from partita.engines.autotune import configure_backends

CLIENTS, STEPS, BATCH, LAYERS, WIDTH = 3, 3, 32, 6, 192
ROUNDS = 10
# Method, options, and the round to play of the ten.
SIDES: dict[str, tuple[str, dict[str, object], int]] = {
    "fedavg": ("fedavg", {}, 9),
    "fedfrozen, warm-up": ("fedfrozen", {"warmup": 5}, 0),
    "fedfrozen, kernel frozen": ("fedfrozen", {"warmup": 5}, 9),
    "fedfrozen, values alone": ("fedfrozen", {"warmup": 5, "scope": "value"}, 9),
    "safl, 2 of 6 layers": ("safl", {"k": 2, "probe": BATCH}, 9),
    "layer-skipping, 2 of 6 layers": ("layer-skipping", {"layers": 0.33}, 9),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    device, onednn, key = torch.device(chosen.device), configure_backends("auto"), Key(0)
    task = data.load("synthetic", key, examples=CLIENTS * 250, size=32, channels=3)
    federation = data.split(task, "iid", clients=CLIENTS, key=key).to(device)
    model = models.build("vit", task, key, layers=LAYERS, width=WIDTH, heads=4, patch=4)
    plays = {}
    for side, (name, given, number) in SIDES.items():
        training = Training(1e-3, AdamW(), steps=STEPS, batch_size=BATCH)
        run = Run(methods.build(name, given), training, rounds=ROUNDS, key=key, drift=False)
        engine = SimulationEngine(run, model, federation, device=device)
        plays[side] = run, engine, number
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for repeat in range(chosen.repeats + 1):
        for side, (run, engine, number) in plays.items():
            start = now(device)
            next(rounds(run, model, engine, initial_server(run, model), number))
            if repeat:  # the first warms up
                times[side].append(now(device) - start)
    seconds = {side: statistics.median(each) for side, each in times.items()}
    work = (
        f"ViT of {LAYERS} layers of width {WIDTH}, 65 tokens; a round of {CLIENTS} clients x {STEPS} AdamW steps x "
        f"batch {BATCH}, one by one, median of {chosen.repeats}, sides in turn"
    )
    about = environment(device, onednn, work)
    print(f"{about['work']}; {about['device']}, {about['threads']} threads, torch {about['torch']}")
    for side, taken in seconds.items():
        print(f"{side:32} {1000 * taken:>8.0f} ms {seconds['fedavg'] / taken:>6.2f}x")
    if chosen.out:
        results = [{"side": side, "seconds": taken, "each": times[side]} for side, taken in seconds.items()]
        chosen.out.write_text(json.dumps({"environment": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
