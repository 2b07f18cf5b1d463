"""Write run folders for reports without running anything."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROLES = {"query": 4096, "key": 4096, "value": 4096, "output": 4096, "mlp": 16384, "norm": 128}
ROUNDS, WARMUP, CLIENTS = 16, 6, 10
CONFIG = """
seed = {seed}
rounds = {rounds}
label = {label}
[method]
name = {label}
{extra}
[data]
name = "cifar10"
[split]
name = "dirichlet"
alpha = 0.3
clients = 10
[model]
name = "vit-tiny"
[training]
optimizer = "adamw"
lr = 0.001
[federation]
cohort = 5
[engine]
name = "embedded"
[evaluate]
personal_every = true
"""


def parameters(label: str, frozen: bool) -> list[dict[str, Any]]:
    listed = [("embed.weight", None, "embedding", 8192), ("head.weight", None, "head", 640)]
    for layer in range(4):
        listed += [(f"blocks.{layer}.{role}.weight", f"layer.{layer}", role, count) for role, count in ROLES.items()]
    rows = []
    for name, layer, role, count in listed:
        still = frozen and role in ("query", "key")
        keep = label == "fedper" and role == "head"
        moves = not still and not keep
        rows.append(
            {"name": name, "layer": layer, "role": role, "parameters": count, "bytes": 4 * count,
             "trains": not still, "up": moves, "down": moves or still, "keep": keep}
        )  # fmt: skip
    return rows


def write_run(
    root: Path, label: str, seed: int, rounds: int = ROUNDS, planned: int = ROUNDS, finished: bool = True,
    edit: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda row: row, height: float = 0.72,
) -> Path:  # fmt: skip
    """A run whose accuracy approaches `height`; `edit` may change each row before it is written, or return None."""
    draw = np.random.default_rng([seed, *label.encode()])
    folder = root / f"{label.replace('/', '-')}-{seed}"
    folder.mkdir(parents=True)
    freezes = label.startswith("fedfrozen")
    lift = {"fedprox": 0.01, "fedfrozen": 0.03}.get(label, 0.0) + draw.normal(0, 0.008)
    own = draw.normal(0, 0.07, CLIENTS)
    names = [f"c{number}" for number in range(CLIENTS)]
    lines = []
    for round in range(rounds):
        frozen = freezes and round >= WARMUP
        plan = parameters(label, frozen)
        cohort = sorted(draw.choice(names, 5, replace=False).tolist())
        accuracy = (height + lift) * (1 - math.exp(-(round + 1) / 5)) + draw.normal(0, 0.008)
        lost = {cohort[0]: "loss is nan after 12 steps"} if label == "fedprox" and seed == 1 and round == 4 else {}
        up = {item["name"]: item["bytes"] * (5 - len(lost)) for item in plan if item["up"]}
        down = {item["name"]: item["bytes"] * 5 for item in plan if item["down"]}
        up[""], down[""] = 200, 300
        drift = {
            role: {"dispersion": scale * math.exp(-round / 12) * draw.uniform(0.9, 1.1), "cosine": 0.4, "distance": 0.1}
            for role, scale in {"query": 0.3, "key": 0.28, "value": 0.16, "mlp": 0.14}.items()
            if not (frozen and role in ("query", "key"))
        }
        drift |= {f"layer.{layer}": {"dispersion": 0.2, "cosine": 0.4, "distance": 0.1} for layer in range(4)}
        personal = {name: float(np.clip(accuracy + 0.05 + gap, 0, 1)) for name, gap in zip(names, own, strict=True)}
        row = edit(
            {
                "round": round, "seconds": float(draw.uniform(1.9, 2.2)), "lr": 1e-3, "cohort": cohort, "lost": lost,
                "train_loss": 2 * math.exp(-round / 6), "test": {"accuracy": accuracy, "loss": 1.5 - accuracy},
                "personal": {"accuracy": personal} if round % 5 == 4 or round == rounds - 1 else None,
                "bytes": {"up": sum(up.values()), "down": sum(down.values())}, "up": up, "down": down, "drift": drift,
            }
        )  # fmt: skip
        if row is not None:
            lines.append(json.dumps(row) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines))
    extra = f"warm_up = {WARMUP}" if freezes else "mu = 0.01" if label == "fedprox" else ""
    (folder / "config.toml").write_text(
        CONFIG.format(seed=seed, rounds=planned, label=json.dumps(label, ensure_ascii=False), extra=extra)
    )
    spans = [(0, min(WARMUP, rounds) - 1), (WARMUP, rounds - 1)] if freezes and rounds > WARMUP else [(0, rounds - 1)]
    stages = [
        {"first": first, "last": last, "client": "c0", "rows": parameters(label, freezes and first >= WARMUP)}
        for first, last in spans
    ]
    (folder / "plan.json").write_text(json.dumps({"stages": stages}))
    environment = {
        "python": "3.11.7",
        "torch": "2.13.0",
        "device": "cpu",
        "partita": "0.1.0",
        "started": f"2025-11-0{1 + seed} 09:00",
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    if finished:
        (folder / "result.json").write_text(
            json.dumps({"rounds": rounds, "seconds": 33.0, "digest": "ab12", "test": None})
        )
    return folder
