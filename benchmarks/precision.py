"""Whether bfloat16 learns what float32 learns: loss curves of FedAvg on real digits, over seeds.

A seed draws the split, the start and the batches, and both precisions share it. What bfloat16 changes is then set
beside what another seed changes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import torch
from environment import environment
from scipy import stats

from partita import Key, Run, SimulationEngine, Training, data, methods, models, rounds
from partita.core.optim import AdamW
from partita.engines.autotune import choose_graphs, configure_backends
from partita.evaluation import score

CLIENTS, STEPS, BATCH, ROUNDS = 10, 5, 32, 20
PRECISIONS = ("float32", "bfloat16")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--width", type=int, default=192)
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    device, onednn = torch.device(chosen.device), configure_backends("auto")
    jobs = [
        (seed, precision, chosen.layers, chosen.width, device)
        for seed in range(chosen.seeds)
        for precision in PRECISIONS
    ]
    if device.type == "cpu":
        with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0)), use_one_core) as pool:
            rows = pool.starmap(play, jobs, chunksize=1)
    else:
        rows = [play(*job) for job in jobs]
    full, half = (np.array([row["losses"] for row in rows if row["precision"] == each]) for each in PRECISIONS)
    apart = np.abs((half - full).mean(0))  # (round,) of the means over seeds
    spread = full.std(0, ddof=1)
    work = (
        f"ViT of {chosen.layers} layers of width {chosen.width} on digits, {CLIENTS} clients by Dirichlet(0.3), "
        f"{ROUNDS} rounds x {STEPS} AdamW steps x batch {BATCH}, {chosen.seeds} seeds"
    )
    about = environment(device, onednn, work)
    print(f"{about['work']}; {about['device']}, {about['threads']} threads, torch {about['torch']}")
    for precision, losses in zip(PRECISIONS, (full, half), strict=True):
        accuracy = np.array([row["accuracy"] for row in rows if row["precision"] == precision])
        told = f"accuracy {accuracy.mean():.4f} ± {accuracy.std(ddof=1):.4f}"
        print(f"{precision:10} last loss {losses[:, -1].mean():.4f} ± {losses[:, -1].std(ddof=1):.4f}, {told}")
    share, p = float((apart / spread).max()), float(stats.ttest_rel(half[:, -1], full[:, -1]).pvalue)
    print(
        f"the means are apart by at most {share:.2f} of the spread over seeds; last round, paired t test: p = {p:.2f}"
    )
    if chosen.out:
        summary = {"largest share of the spread": share, "p of the last round": p}
        result = {"environment": about, "summary": summary, "results": rows}
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")


def use_one_core() -> None:
    torch.set_num_threads(1)
    configure_backends("auto")


def play(seed: int, precision: str, layers: int, width: int, device: torch.device) -> dict[str, object]:
    key = Key(seed)
    task = data.load("digits", key)
    federation = data.split(task, "dirichlet", clients=CLIENTS, alpha=0.3, key=key).to(device)
    model = models.build("vit", task, key, layers=layers, width=width, heads=4, patch=2)
    training = Training(1e-3, AdamW(), steps=STEPS, batch_size=BATCH, precision=precision)
    run = Run(methods.build("fedavg"), training, rounds=ROUNDS, key=key, drift=False)
    block, graphs = (CLIENTS, choose_graphs(True, False, device)) if device.type == "cuda" else (1, None)
    engine = SimulationEngine(run, model, federation, block, device, graphs=graphs)
    played = list(rounds(run, model, engine))
    accuracy = score(model, played[-1].server.params, federation.task.test)["accuracy"]
    return {"seed": seed, "precision": precision, "losses": [each.loss for each in played], "accuracy": accuracy}


if __name__ == "__main__":
    main()
