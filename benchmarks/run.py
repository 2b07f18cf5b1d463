"""One round of FedAvg, timed against a bare PyTorch loop that does the same work on the same batches.

Prints ratios from one run: absolute times depend on the machine and on what else it does. Both sides must reach the
same tensors, or the comparison is void: what lies between them may be 0.0001 of the way that the bare loop came. By
itself that loop is off from its own result in float64, and by how much is told beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from environment import environment
from torch import Tensor
from torch.nn import functional
from transformers import ViTConfig, ViTForImageClassification

from partita import Key, Run, SimulationEngine, Training, data, methods, models, rounds
from partita.core import tensors
from partita.core.batch_schedule import shuffled_batches
from partita.core.data import Examples
from partita.core.optim import AdamW
from partita.core.tensors import Tensors
from partita.data import Federation
from partita.engines.autotune import choose_graphs, configure_backends

Work = list[tuple[Examples, list[Tensor]]]
Side = tuple[int, str, tuple[bool, bool] | None]  # block, precision, and whether it is recorded and compiled

CLIENTS, STEPS, BATCH = 10, 5, 32
LEAST = 0.1  # seconds of each turn
SIZES = {
    "tiny (1 layer, width 16, 5 tokens)": (1, 16, 8, 4),
    "small (2, 64, 65)": (2, 64, 32, 4),
    "medium (6, 192, 65)": (6, 192, 32, 4),
    "large (12, 384, 65)": (12, 384, 32, 4),
}
ON_CPU = list(SIZES)[:3]  # the largest would take minutes


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--sizes", nargs="*", choices=list(SIZES), metavar="SIZE", help=", ".join(SIZES))
    options.add_argument("--bf16", action="store_true", help="on a CPU too: for one that has it (AMX, AVX-512)")
    options.add_argument("--sides", nargs="*", help="only these ways to play a round, and block 1; default: all")
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    device = torch.device(chosen.device)
    onednn = configure_backends("auto")  # for both sides
    torch.backends.cudnn.allow_tf32 = False  # or the bare loop's convolution would not be in float32
    sizes = chosen.sizes or (ON_CPU if device.type == "cpu" else SIZES)
    sides = ours(device, chosen.bf16 or device.type == "cuda")
    if unknown := set(chosen.sides or ()) - sides.keys():
        options.error(f"no side is called '{unknown.pop()}'; there are {', '.join(sides)}")
    sides = {side: how for side, how in sides.items() if side in ("block 1", *(chosen.sides or sides))}
    results = [measure(size, device, chosen.repeats, sides) for size in sizes]
    about = environment(
        device,
        onednn,
        f"{CLIENTS} clients x {STEPS} AdamW steps x batch {BATCH}, median of {chosen.repeats}, sides in turn",
    )
    print(f"{about['work']}; {about['device']}, {about['threads']} threads, torch {about['torch']}")
    print(f"{'model':36} {'bare loop':>10}", *(f"{side:>14}" for side in sides), f"{'difference':>11} {'rounding':>9}")
    for row in results:
        ratios = [f"{row['bare'] / row[side]:>13.2f}x" for side in sides]
        told = f"{row['difference']:>11.0e} {row['rounding']:>9.0e}"
        print(f"{row['model']:36} {1000 * row['bare']:>7.0f} ms", *ratios, told)
        worst = row["farthest"]
        print(
            f"  of single tensors, by its norm, {worst['tensor']} is farthest: "
            f"{worst['difference']:.0e}, and {worst['rounding']:.0e} by rounding"
        )
    print("a ratio above 1 is faster than the bare loop")
    print("difference: of the way the bare loop came; rounding: how far the bare loop itself is off from float64")
    if void := [row["model"] for row in results if row["difference"] > 1e-4]:
        raise SystemExit(
            f"partita and the bare loop did not reach the same tensors, so this is void: {'; '.join(void)}"
        )
    if chosen.out:
        chosen.out.write_text(json.dumps({"environment": about, "results": results}, indent=1) + "\n")


def ours(device: torch.device, half: bool) -> dict[str, Side]:
    """Clients side by side, precision, and whether steps are captured and compiled."""
    gpu = device.type == "cuda"
    block, plain, compiled = (10, "graphs", "graphs, compiled") if gpu else (1, "block 1", "compiled")
    sides: dict[str, Side] = {"block 1": (1, "float32", None), "block 10": (10, "float32", None)}
    for precision, told in {"float32": "", "bfloat16": ", bf16"}.items():
        if precision == "float32" or half:
            sides[plain + told] = block, precision, (gpu, False)
            sides[compiled + told] = block, precision, (gpu, True)
    return sides


def measure(size: str, device: torch.device, repeats: int, chosen: dict[str, Side]) -> dict[str, Any]:
    torch.compiler.reset()  # or programs would be made for every size at once, and slower
    layers, width, pixels, patch = SIZES[size]
    key = Key(0)
    task = data.load("synthetic", key, examples=CLIENTS * 250, size=pixels, channels=3)
    federation = data.split(task, "iid", clients=CLIENTS, key=key)
    staged = federation.to(device)
    shape = {"layers": layers, "width": width, "heads": 4, "patch": patch}
    model = models.build("vit", task, key, **shape)
    sides: dict[str, Callable[[], Tensors]] = {}
    for side, (block, precision, how) in chosen.items():
        training = Training(1e-3, AdamW(), steps=STEPS, batch_size=BATCH, precision=precision)
        run = Run(methods.build("fedavg"), training, rounds=1, key=key, drift=False)
        engine = SimulationEngine(
            run, model, staged, block, device, graphs=choose_graphs(*how, device) if how else None
        )
        sides[side] = lambda run=run, engine=engine: next(rounds(run, model, engine)).server.params
    module = plain_vit(size, len(task.classes)).to(device)
    start = {name: value.to(device) for name, value in model.initial.items()}
    work = dealt(federation, training, key)
    sides["bare"] = lambda: bare_round(module, start, work, device)
    exact = bare_round(deepcopy(module).double(), {name: value.double() for name, value in start.items()}, work, device)
    times: dict[str, list[float]] = {side: [] for side in sides}
    results: dict[str, Tensors] = {}
    for repeat in range(repeats + 2):
        for side, play in sides.items():
            seconds, results[side] = timed(play, device)
            if repeat > 1:  # the first two warm up, compile and record
                times[side].append(seconds)
    bare, names = results["bare"], felt(start)
    way = between(bare, start, names)
    in_full = [results[side] for side, (_, precision, _) in chosen.items() if precision == "float32"]
    apart = {name: max(between(each, bare, [name]) for each in in_full) / float(bare[name].norm()) for name in names}
    worst = max(names, key=apart.__getitem__)
    alone = between(bare, exact, [worst]) / float(bare[worst].norm())
    return {
        "model": size,
        **{side: statistics.median(each) for side, each in times.items()},
        "difference": max(between(each, bare, names) for each in in_full) / way,
        "rounding": between(bare, exact, names) / way,
        "farthest": {"tensor": worst, "difference": apart[worst], "rounding": alone},
    }


def felt(names: Iterable[str]) -> list[str]:
    """Without the key biases: softmax cannot feel them, so AdamW moves them by rounding alone (docs/decisions/0004)."""
    return [name for name in names if "k_proj.bias" not in name]


def between(left: Tensors, right: Tensors, names: list[str]) -> float:
    """The distance of all these tensors together. Of single numbers it says little: where a gradient is nearly zero,
    AdamW makes a step of a rounding.
    """
    return float(tensors.norm(tensors.subtract(tensors.select(left, names), right)))


def plain_vit(size: str, classes: int) -> ViTForImageClassification:
    layers, width, pixels, patch = SIZES[size]
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=2 * width,
            image_size=pixels, patch_size=patch, num_channels=3, num_labels=classes, attn_implementation="sdpa",
        )
    )  # fmt: skip


def dealt(federation: Federation, training: Training, key: Key) -> Work:
    """The examples of each client, and the batches that the first round takes of them."""
    draw = key / "round" / 0 / "client"
    parts = {client: federation[client].train for client in federation.clients}
    deals = {
        client: shuffled_batches(len(part), training, None, draw / client / "batches" / 0)
        for client, part in parts.items()
    }
    return [(part, list(deals[client])) for client, part in parts.items()]


def bare_round(
    module: ViTForImageClassification,
    start: Tensors,
    work: Work,
    device: torch.device,
) -> Tensors:
    """What one would write by hand: load, train with torch.optim, add to the weighted mean."""
    total = sum(len(examples) for examples, _ in work)
    mean = {name: torch.zeros_like(value) for name, value in start.items()}
    kind = next(iter(start.values())).dtype
    for examples, batches in work:
        module.load_state_dict(start)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.01)
        for indices in batches:
            batch = examples.take(indices)
            logits = module(batch.inputs["pixel_values"].to(device, kind)).logits
            loss = functional.cross_entropy(logits, batch.targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for name, value in module.named_parameters():
                mean[name] += value * (len(examples) / total)
    return mean


def timed(play: Callable[[], Tensors], device: torch.device) -> tuple[float, Tensors]:
    """The seconds of a round. Short ones are played in a row, as they are in a run."""
    started, played, seconds = time.perf_counter(), 0, 0.0
    while seconds < LEAST:
        result = play()
        if device.type == "cuda":
            torch.cuda.synchronize()
        played, seconds = played + 1, time.perf_counter() - started
    return seconds / played, result


if __name__ == "__main__":
    main()
