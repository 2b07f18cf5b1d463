"""Run server rules against simulated attackers and print the tables of this study's README.

python studies/robust/run.py digits.toml --out digits.jsonl
python studies/robust/run.py trec.toml --out trec.jsonl --attacks sign-flip --set data.path=... --set model.path=...
python studies/robust/run.py --table digits.jsonl
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RULES = {
    "fedavg": ["method.name=fedavg"],
    "median": ["method.name=median"],
    "trimmed-mean(trim=0.3)": ["method.name=trimmed-mean", "method.trim=0.3"],
    "krum(attackers=0.3)": ["method.name=krum", "method.attackers=0.3"],
    "krum(attackers=0.3, keep=10)": ["method.name=krum", "method.attackers=0.3", "method.keep=10"],
    "geometric-median": ["method.name=geometric-median"],
}
LEVELS = (0.0, 0.1, 0.2, 0.3)


def settings(attacks: list[str], seeds: int) -> list[dict[str, Any]]:
    """Return one dict per run: without attackers at two skews, and every attack at every level."""
    found: list[dict[str, Any]] = []
    for rule in RULES:
        for seed in range(seeds):
            common = {"rule": rule, "seed": seed}
            found.append({**common, "alpha": 0.1, "attack": "none", "attackers": 0.0})
            found.append({**common, "alpha": 1.0, "attack": "none", "attackers": 0.0})
            for attack in attacks:
                found += [{**common, "alpha": 1.0, "attack": attack, "attackers": level} for level in LEVELS[1:]]
    return found


def run_one(config: Path, setting: dict[str, Any], changes: list[str]) -> dict[str, Any]:
    """Run one setting. A run whose model is no longer finite has no accuracy."""
    from partita.experiment.config import load
    from partita.experiment.runner import start

    overrides = [
        *changes,
        "method={}",
        *RULES[setting["rule"]],
        f"seed={setting['seed']}",
        f"split.alpha={setting['alpha']}",
        f"federation.attackers={setting['attackers']}",
    ]
    if setting["attackers"]:
        overrides.append(f"federation.attack={setting['attack']}")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        [row] = deque(start(load(config, overrides), Path(folder) / "run"), maxlen=1)
    return {**setting, "accuracy": row["test"].get("accuracy"), "seconds": round(time.perf_counter() - began, 1)}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the Markdown table: mean and standard deviation over seeds of the final accuracy in percent."""
    columns = sorted({(row["attack"] != "none", row["attack"], row["alpha"], row["attackers"]) for row in rows})
    titles = [
        f"{attack}, {level:.0%}" if attacked else f"no attack, Dirichlet {alpha:g}"
        for attacked, attack, alpha, level in columns
    ]
    lines = [["rule", *titles], ["---", *["--:"] * len(titles)]]
    for rule in dict.fromkeys(row["rule"] for row in rows):
        cells = []
        for _, attack, alpha, level in columns:
            fitting = [
                row["accuracy"]
                for row in rows
                if (row["rule"], row["attack"], row["alpha"], row["attackers"]) == (rule, attack, alpha, level)
            ]
            known = [100 * value for value in fitting if value is not None]
            spread = statistics.stdev(known) if len(known) > 1 else 0.0
            lost = f" ({len(fitting) - len(known)} not finite)" if len(known) < len(fitting) else ""
            cells.append(f"{statistics.fmean(known):.1f} ± {spread:.1f}{lost}" if known else f"–{lost}")
        lines.append([f"`{rule}`", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="a config in this folder")
    parser.add_argument("--out", type=Path, help="file for one JSON line per run; finished runs in it are kept")
    parser.add_argument("--attacks", default="sign-flip,label-flip", help="comma-separated")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="runs in parallel")
    parser.add_argument("--set", dest="changes", action="append", default=[], help="override a config key")
    parser.add_argument("--table", type=Path, help="print the table of this file and do nothing else")
    asked = parser.parse_args()
    if asked.table:
        print(table([json.loads(line) for line in asked.table.read_text().splitlines()]))
        return
    if not asked.config or not asked.out:
        parser.error("give a config and --out")
    done = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    known = {(row["rule"], row["seed"], row["alpha"], row["attack"], row["attackers"]) for row in done}
    left = [
        each
        for each in settings(asked.attacks.split(","), asked.seeds)
        if (each["rule"], each["seed"], each["alpha"], each["attack"], each["attackers"]) not in known
    ]
    with ProcessPoolExecutor(asked.jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(run_one, HERE / asked.config, setting, asked.changes) for setting in left]
        for place, future in enumerate(as_completed(waiting), 1):
            row = future.result()
            with asked.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{place}/{len(left)}: {row}", flush=True)
    print(table([json.loads(line) for line in asked.out.read_text().splitlines()]))


if __name__ == "__main__":
    main()
