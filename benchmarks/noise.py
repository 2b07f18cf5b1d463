"""What secure noise costs: the cipher beside torch's own generator, alone and in a round of DP-SGD.

All sides in turn in one run, the same model, clients and batches. The side "torch" draws float32 noise by a seeded
torch generator, which nobody should do: on a CPU it can be guessed (benchmarks/attack/guess_noise.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from environment import environment, now

from partita import Key, Run, SimulationEngine, Training, data, methods, models
from partita.core.dp_settings import PrivacySettings
from partita.core.noise import gaussian_noise
from partita.core.optim import AdamW
from partita.core.rounds import initial_server, rounds
from partita.core.tensors import Tensors
from partita.engines.autotune import configure_backends
from partita.training import private_gradients

CLIENTS, STEPS, BATCH = 4, 5, 32
SIZES = {"small": (2, 64), "medium": (6, 384)}


def seeded(like: Tensors, key: Key, std: float) -> Tensors:
    return {
        name: std
        * torch.randn(
            value.shape,
            generator=torch.Generator(value.device).manual_seed((key / name).seed() % 2**63),
            device=value.device,
        )
        for name, value in like.items()
    }


def seeded_block(like: Tensors, keys: Sequence[Key], std: float) -> Tensors:
    parts = [seeded(like, key, std) for key in keys]
    return {name: torch.stack([part[name] for part in parts]) for name in like}


def plain_sum(value: torch.Tensor, noise: torch.Tensor, std: float) -> torch.Tensor:
    return value + noise


def with_torch() -> AbstractContextManager[object]:
    return patch.multiple(private_gradients, block_noise=seeded_block, add_noise_once=plain_sum)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--sizes", default="small")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    device, onednn = torch.device(chosen.device), configure_backends("auto")
    results = []
    for size in chosen.sizes.split(","):
        results += measure(size, device, chosen.repeats)
    work = (
        f"ViT, 65 tokens; noise for all its parameters, and a round of {CLIENTS} clients x {STEPS} AdamW steps x batch "
        f"{BATCH} of DP-SGD (noise 1, clip 1); median of {chosen.repeats}, sides in turn"
    )
    about = environment(device, onednn, work)
    print(f"{work}; {about['device']}, {about['threads']} threads, torch {about['torch']}")
    for each in results:
        print(f"{each['size']:8} {each['side']:32} {1000 * each['seconds']:>9.1f} ms {each['ratio']:>6.2f}x")
    if chosen.out:
        chosen.out.write_text(json.dumps({"environment": about, "results": results}, indent=1) + "\n")


def measure(size: str, device: torch.device, repeats: int) -> list[dict[str, object]]:
    layers, width = SIZES[size]
    key = Key(0)
    task = data.load("synthetic", key, examples=CLIENTS * 250, size=32, channels=3)
    federation = data.split(task, "iid", clients=CLIENTS, key=key).to(device)
    model = models.build("vit", task, key, layers=layers, width=width, heads=4, patch=4)
    training = Training(1e-3, AdamW(), steps=STEPS, batch_size=BATCH)
    plain = Run(methods.build("fedavg", {}), training, rounds=2, key=key, drift=False)
    noisy = replace(plain, method=replace(plain.method, privacy=PrivacySettings(clip=1.0, noise=1.0)))
    model.to(device)
    like = {name: value.to(device) for name, value in model.initial.items()}

    def play(run: Run, block_size: int) -> None:
        next(
            rounds(
                run, model, SimulationEngine(run, model, federation, block_size, device), initial_server(run, model), 0
            )
        )

    sides: dict[str, tuple[Callable[[], object], Callable[[], AbstractContextManager[object]]]] = {
        "noise, torch": (lambda: seeded(like, key, 1.0), nullcontext),
        "noise, cipher": (lambda: gaussian_noise(like, key, 1.0), nullcontext),
    }
    for clients in (1, CLIENTS):
        sides[f"round without privacy, {clients} together"] = lambda c=clients: play(plain, c), nullcontext  # type: ignore[misc]
        sides[f"private round, torch, {clients} together"] = lambda c=clients: play(noisy, c), with_torch  # type: ignore[misc]
        sides[f"private round, cipher, {clients} together"] = lambda c=clients: play(noisy, c), nullcontext  # type: ignore[misc]
    times: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(repeats + 1):
        for side, (work, context) in sides.items():
            with context():
                start = now(device)
                work()
                if repeat:  # the first warms up
                    times[side].append(now(device) - start)
    seconds = {side: statistics.median(each) for side, each in times.items()}
    return [
        {"size": size, "side": side, "seconds": taken, "ratio": taken / seconds[side.replace("cipher", "torch")]}
        for side, taken in seconds.items()
    ]


if __name__ == "__main__":
    main()
