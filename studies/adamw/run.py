"""Measure what each option of local AdamW is worth on a pretrained encoder, and print the tables of the README.

python studies/adamw/run.py trec.toml --tune --set data.path=... --set model.path=...
python studies/adamw/run.py trec.toml --rates 1e-4,4e-4 --out trec.jsonl --set data.path=... --set model.path=...
python studies/adamw/run.py --table trec.jsonl
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WARMUP, LAYERS, NORMS, KEEP = (
    "training.warmup_steps=10",
    "training.layer_decay=0.8",
    "training.decay_norms_and_biases=false",
    "training.keep_optimizer=true",
)
VARIANTS = {
    "fedavg": [],
    "warmup_steps = 10": [WARMUP],
    "layer_decay = 0.8": [LAYERS],
    "decay_norms_and_biases = false": [NORMS],
    "keep_optimizer = true": [KEEP],
    "the first three": [WARMUP, LAYERS, NORMS],
    "all four": [WARMUP, LAYERS, NORMS, KEEP],
    "fedadamw": ["method.name=fedadamw"],
    "fedadamw(alpha=0)": ["method.name=fedadamw", "method.alpha=0.0"],
    "fedadamw(share_moments=false)": ["method.name=fedadamw", "method.share_moments=false"],
}
TUNED_RATES = (3e-5, 1e-4, 3e-4, 1e-3)
TUNED_SEED = 100  # not a seed of the study
LAST = 3  # rounds whose mean counts: single rounds jump


def run_one(config: Path, setting: dict[str, Any], changes: list[str]) -> dict[str, Any]:
    """Run one setting; return it with its mean accuracy in the last rounds."""
    from partita.core.rounds import rounds
    from partita.evaluation import score
    from partita.experiment.builder import build, build_engine
    from partita.experiment.config import load
    from partita.storage.client_store import MemoryStore

    overrides = [
        *changes,
        *VARIANTS[setting["variant"]],
        f"seed={setting['seed']}",
        f"training.lr={setting['lr']}",
    ]
    began = time.perf_counter()
    experiment = build(load(config, overrides))
    run, federation = experiment.run, experiment.federation
    parts = [federation.test]
    if setting["validate"]:
        parts = [part for client in federation.clients if len(part := federation[client].validation)]
    found = []
    for result in rounds(run, experiment.model, build_engine(experiment, MemoryStore())):
        if result.number >= run.rounds - LAST:
            params = result.server.params
            rights = [len(part) * score(experiment.model, params, part)["accuracy"] for part in parts]
            found.append(sum(rights) / sum(map(len, parts)))
    return {**setting, "accuracy": statistics.fmean(found), "seconds": round(time.perf_counter() - began, 1)}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the Markdown table: accuracy in percent, and the paired difference to fedavg."""
    rates = sorted({row["lr"] for row in rows})
    head = ["", *(title for rate in rates for title in (f"lr {rate:g}", "to `fedavg`"))]
    lines = [head, ["---", *["--:"] * (len(head) - 1)]]
    by_key = {(row["variant"], row["lr"], row["seed"]): 100 * row["accuracy"] for row in rows}
    for variant in [each for each in VARIANTS if any(row["variant"] == each for row in rows)]:
        cells = [f"`{variant}`" if variant.split("(")[0] in ("fedavg", "fedadamw") or "=" in variant else variant]
        for rate in rates:
            seeds = sorted(seed for name, lr, seed in by_key if (name, lr) == (variant, rate))
            values = [by_key[variant, rate, seed] for seed in seeds]
            gains = [by_key[variant, rate, seed] - by_key["fedavg", rate, seed] for seed in seeds]
            cells.append(_spread(values))
            cells.append("–" if variant == "fedavg" else _spread(gains, "+"))
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _spread(values: list[float], sign: str = "") -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):{sign}.1f} ± {spread:.1f}" if values else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="a config in this folder")
    parser.add_argument("--tune", action="store_true", help="print fedavg's validation accuracy by learning rate")
    parser.add_argument("--rates", default="", help="learning rates, comma-separated")
    parser.add_argument("--only", action="append", help="run this variant and no other; can be repeated")
    parser.add_argument("--out", type=Path, help="file for one JSON line per run; finished runs in it are kept")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=4, help="runs in parallel")
    parser.add_argument("--set", dest="changes", action="append", default=[], help="override a config key")
    parser.add_argument("--table", type=Path, help="print the table of this file and do nothing else")
    asked = parser.parse_args()
    if asked.table:
        print(table([json.loads(line) for line in asked.table.read_text().splitlines()]))
        return
    if not asked.config or not (asked.tune or (asked.out and asked.rates)):
        parser.error("give a config with --tune, or with --rates and --out")
    if asked.tune:
        settings = [{"variant": "fedavg", "lr": lr, "seed": TUNED_SEED, "validate": True} for lr in TUNED_RATES]
    else:
        rates = [float(rate) for rate in asked.rates.split(",")]
        settings = [
            {"variant": variant, "lr": lr, "seed": seed, "validate": False}
            for seed in range(asked.seeds)
            for variant in asked.only or VARIANTS
            for lr in rates
        ]
    done = asked.out.read_text().splitlines() if asked.out and asked.out.exists() else []
    known = {(row["variant"], row["lr"], row["seed"]) for row in map(json.loads, done)}
    left = [each for each in settings if (each["variant"], each["lr"], each["seed"]) not in known]
    with ProcessPoolExecutor(asked.jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(run_one, HERE / asked.config, setting, asked.changes) for setting in left]
        for place, future in enumerate(as_completed(waiting), 1):
            row = future.result()
            if asked.out:
                with asked.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            print(f"{place}/{len(left)}: {row}", flush=True)
    if asked.out:
        print(table([json.loads(line) for line in asked.out.read_text().splitlines()]))


if __name__ == "__main__":
    main()
