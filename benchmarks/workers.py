"""Clients shared out among processes, against two plain processes of a bare PyTorch loop: the best one does by hand.

The same work on the same batches, all sides in turn in one run. Prints ratios to the bare loop in one process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from environment import environment
from run import BATCH, CLIENTS, ON_CPU, SIZES, STEPS, bare_round, between, dealt, felt, plain_vit, timed

from partita import Key, Run, SimulationEngine, Training, data, methods, models, rounds
from partita.core.optim import AdamW
from partita.core.tensors import Tensors
from partita.engines.autotune import configure_backends
from partita.engines.multiprocess import MultiprocessEngine

PROCESSES = 2
SIDES = ("bare", "bare, 2 processes", "partita", "partita, 2 workers")
HALF = "partita, 2 workers, bf16"
CPU = torch.device("cpu")
WORK: dict[str, Any] = {}  # what forks inherit


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--sizes", nargs="*", default=ON_CPU)
    options.add_argument("--clients", type=int, default=CLIENTS)
    options.add_argument("--bf16", action="store_true", help="in bfloat16 too: for a CPU that has it (AMX, AVX-512)")
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    onednn = configure_backends("auto")
    sides = (*SIDES, HALF) if chosen.bf16 else SIDES
    results = [measure(size, chosen.clients, chosen.repeats, sides) for size in chosen.sizes]
    work = f"{chosen.clients} clients x {STEPS} AdamW steps x batch {BATCH}, median of {chosen.repeats}, sides in turn"
    about = environment(CPU, onednn, work)
    print(f"{about['work']}; {about['device']}, {about['threads']} threads, torch {about['torch']}")
    print(f"{'model':36}", *(f"{side:>24}" for side in sides))
    for row in results:
        ratios = [f"{row['bare'] / row[side]:>23.2f}x" for side in sides[1:]]
        print(f"{row['model']:36} {1000 * row['bare']:>21.0f} ms", *ratios)
    print("a ratio above 1 is faster than the bare loop")
    if chosen.out:
        chosen.out.write_text(json.dumps({"environment": about, "results": results}, indent=1) + "\n")


def measure(size: str, clients: int, repeats: int, sides: tuple[str, ...]) -> dict[str, Any]:
    layers, width, pixels, patch = SIZES[size]
    key = Key(0)
    task = data.load("synthetic", key, examples=clients * 250, size=pixels, channels=3)
    federation = data.split(task, "iid", clients=clients, key=key)
    model = models.build("vit", task, key, layers=layers, width=width, heads=4, patch=patch)
    training = Training(1e-3, AdamW(), steps=STEPS, batch_size=BATCH)
    run = Run(methods.build("fedavg"), training, rounds=1, key=key, drift=False)
    half = replace(run, training=replace(training, precision="bfloat16"))
    module, start, work = plain_vit(size, len(task.classes)), dict(model.initial), dealt(federation, training, key)
    WORK.update(module=module, start=start, work=work)
    engine = SimulationEngine(run, model, federation)
    fork = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        workers = stack.enter_context(closing(MultiprocessEngine(engine, PROCESSES)))
        pool = stack.enter_context(ProcessPoolExecutor(PROCESSES, fork, _alone))
        list(pool.map(abs, range(PROCESSES)))  # forks now: after a backward pass torch may not
        plays: dict[str, Callable[[], Tensors]] = {
            "bare": lambda: bare_round(module, start, work, CPU),
            "bare, 2 processes": lambda: _mean(list(pool.map(_part, range(PROCESSES)))),
            "partita": lambda: next(rounds(run, model, engine)).server.params,
            "partita, 2 workers": lambda: next(rounds(run, model, workers)).server.params,
        }
        if HALF in sides:
            in_half = stack.enter_context(
                closing(MultiprocessEngine(SimulationEngine(half, model, federation), PROCESSES))
            )
            plays[HALF] = lambda: next(rounds(half, model, in_half)).server.params
        times: dict[str, list[float]] = {side: [] for side in sides}
        results: dict[str, Tensors] = {}
        for repeat in range(repeats + 1):
            for side in sides:
                seconds, results[side] = timed(plays[side], CPU)
                if repeat:  # the first warms up
                    times[side].append(seconds)
    names = felt(start)
    way = between(results["bare"], start, names)
    for side in SIDES[1:]:
        if (apart := between(results[side], results["bare"], names) / way) > 1e-4:
            raise SystemExit(f"{size}: {side} and the bare loop differ by {apart:.1e}; the comparison is void")
    return {"model": size, **{side: statistics.median(each) for side, each in times.items()}}


def _alone() -> None:
    torch.set_num_threads(1)


def _part(number: int) -> tuple[Tensors, int]:
    mine = WORK["work"][number::PROCESSES]
    return bare_round(WORK["module"], WORK["start"], mine, CPU), sum(len(examples) for examples, _ in mine)


def _mean(parts: list[tuple[Tensors, int]]) -> Tensors:
    total = sum(count for _, count in parts)
    return {name: sum(part[name] * (count / total) for part, count in parts) for name in parts[0][0]}  # type: ignore[misc]


if __name__ == "__main__":
    main()
