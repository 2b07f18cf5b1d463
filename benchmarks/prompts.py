"""pFedDC on random towers of ViT-B/16's shape: seconds a step and memory, clients one by one and side by side."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from environment import environment

from partita import Key, Run, SimulationEngine, Training, data, methods, rounds
from partita.core.optim import SGD
from partita.data import Federation, Table, Task
from partita.engines.autotune import configure_backends
from partita.models.prompts.clip import clip

GIB = 2**30


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU, else float32")
    options.add_argument("--clients", type=int, default=10)
    options.add_argument("--batch", type=int, default=32)
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--classes", type=int, default=10)
    options.add_argument("--methods", nargs="+", default=["pfeddc", "promptfl", "vpfl", "fedotp"])
    options.add_argument("--tiny", action="store_true", help="small towers and images, to see that it runs")
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    device = torch.device(chosen.device)
    dtype = chosen.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    onednn = configure_backends("auto")
    size, shape = (8, "tiny") if chosen.tiny else (224, "b16")
    work = (
        f"{chosen.clients} clients x {chosen.steps} steps of batch {chosen.batch}, images of {size} pixels, "
        f"{chosen.classes} classes, random {shape} towers in {dtype}"
    )
    about = environment(device, onednn, work)
    federation = images(chosen.clients, chosen.batch, size, chosen.classes)
    training = Training(1e-3, SGD(momentum=0.9), batch_size=chosen.batch, steps=chosen.steps)
    towers = clip(federation.task, Key(0), shape=shape, dtype=dtype)  # type: ignore[arg-type]
    rows = []
    print(f"{about['work']}; {about['device']}, {about['threads']} threads, torch {about['torch']}")
    for name in chosen.methods:
        for block in (1, chosen.clients):
            rows.append(measure(name, towers, federation, training, block, device))
            print("  ".join(f"{what} {value}" for what, value in rows[-1].items()), flush=True)
    if chosen.out:
        chosen.out.write_text(json.dumps({"environment": about, "results": rows}, indent=1) + "\n")


def measure(
    name: str, towers: Any, federation: Federation, training: Training, block: int, device: torch.device
) -> dict[str, Any]:
    """The second round: the first one warms kernels and memory up."""
    method = methods.build(name)
    assert method.extend, f"{name} adds nothing to the towers"
    model = method.extend(towers, Key(0) / "extend")
    run = Run(method, training, rounds=2, key=Key(0), drift=False)
    engine = SimulationEngine(run, model, federation, block, device=device)
    stream = rounds(run, model, engine)
    next(stream)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    played = next(stream)  # its loss is a number: a GPU has finished
    took = time.perf_counter() - start
    clients, steps = len(federation.clients), training.steps or 1
    row = {
        "method": name,
        "block": block,
        "milliseconds a client's step": round(1000 * took / (clients * steps), 2),
        "bytes up a client": sum(played.traffic.up.values()) // clients,
    }
    if device.type == "cuda":
        row["peak GiB on the GPU"] = round(torch.cuda.max_memory_allocated(device) / GIB, 2)
    return row


def images(clients: int, batch: int, size: int, classes: int) -> Federation:
    """A random batch for each client."""
    draw = (Key(0) / "images").generator()
    pixels = torch.randn(clients * batch, 3, size, size, generator=draw)
    targets = torch.randint(classes, (clients * batch,), generator=draw)
    table = Table({"pixel_values": pixels}, targets)
    names = tuple(f"class {number}" for number in range(classes))
    task = Task("images", table, table, names, channels=3, size=size)
    return data.split(task, "iid", clients=clients, key=Key(0), validation=0.0, test=0.0)


if __name__ == "__main__":
    main()
