"""Compare federated methods that fine-tune the adapters of a language model, and print the table of the README.

python studies/language_models/run.py --tune --out studies/language_models/tune.jsonl --data questions --model smollm2
python studies/language_models/run.py --out questions.jsonl --data questions --model smollm2
python studies/language_models/run.py --table questions.jsonl
python studies/language_models/run.py --plot questions.jsonl
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CONFIG = HERE / "questions.toml"
SCORE = "exact_match"
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedfrozen": {"warmup": 3},
    "safl": {"k": 10},
    "fedper": {"personal": ["layer.27", "layer.28", "layer.29"]},
    "ffa-lora": {},
    "flora": {"rank": 8, "alpha": 16.0, "roles": ["query", "key", "value", "output"]},
    "fedadam": {},
    "local-only": {},
    "centralized": {},
}
OWN_FACTORS = ("flora",)  # the server adds the factors' products to the base, so the model has no adapter
OWN_MODELS = ("fedper", "local-only")  # twelve models are tested instead of one, so only after the last round
RATES = {"fedavg": (3e-4, 1e-3, 3e-3, 1e-2), "centralized": (1e-4, 3e-4, 1e-3, 3e-3)}
SERVER_RATES = (3e-3, 1e-2, 3e-2)  # of fedadam, with fedavg's rate at the clients
TUNED = HERE / "tune.jsonl"
TUNED_SEED = 100  # not a seed of the study


def run_one(setting: Mapping[str, Any], data: str, model: str) -> dict[str, Any]:
    """Run one setting; return it with its scores by round, those of each client, bytes and seconds."""
    import partita

    method, tunes = setting["method"], setting["seed"] == TUNED_SEED
    raw = tomllib.loads(CONFIG.read_text())
    raw["seed"], raw["data"]["path"], raw["model"]["path"] = setting["seed"], data, model
    raw["training"]["lr"] = setting["lr"]
    raw["method"] = {"name": method, **METHODS[method]}
    if method == "fedadam":
        raw["method"]["lr"] = setting["server_lr"]
    if method in OWN_FACTORS:
        del raw["model"]["adapter"]
    if method in OWN_MODELS:
        raw["evaluate"]["every"] = raw["rounds"]
    if tunes:
        raw["evaluate"] |= {"validation_every": 1, "every": raw["rounds"], "personal_every": 0}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        recorded = partita.run(raw, Path(folder) / "run")
        sizes = [file.stat().st_size for file in (Path(folder) / "run").rglob("*.safetensors")]
    part = "validation" if tunes else "test"
    return {
        **setting,
        "scores": [row[part][SCORE] for row in recorded.rows if row.get(part)],
        "losses": [row[part]["loss"] for row in recorded.rows if row.get(part)],
        "bytes": [sum(row["bytes"].values()) for row in recorded.rows],
        "personal": {} if tunes else dict(recorded.personal_scores[SCORE]),
        "checkpoint": max(sizes, default=0),
        "round_seconds": statistics.median(row["seconds"] for row in recorded.rows),
        "seconds": round(time.perf_counter() - began, 1),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the Markdown table. Differences to fedavg are paired by seed, with the p-value of a paired t-test."""
    from scipy.stats import ttest_rel

    head = ("", "mean over clients", "to `fedavg`", "p", "worst client", "all questions", "MB", "s per round")
    lines = [head, ("---", *["--:"] * (len(head) - 1))]
    means = {(row["method"], row["seed"]): 100 * statistics.fmean(row["personal"].values()) for row in rows}
    for method in METHODS:
        own = sorted((row for row in rows if row["method"] == method), key=lambda row: row["seed"])
        if not own:
            continue
        values = [means[method, row["seed"]] for row in own]
        base = [means["fedavg", row["seed"]] for row in own]
        clients = method != "centralized"  # it has one client with all data
        differs = clients and method != "fedavg" and len(own) > 1
        lines.append(
            (
                f"`{method}`",
                spread(values) if clients else "–",
                spread([value - other for value, other in zip(values, base, strict=True)], "+") if differs else "–",
                f"{ttest_rel(values, base).pvalue:.3f}" if differs else "–",
                spread([100 * min(row["personal"].values()) for row in own]) if clients else "–",
                spread([100 * row["scores"][-1] for row in own]),
                f"{statistics.fmean(sum(row['bytes']) for row in own) / 1e6:,.1f}",
                f"{statistics.median(row['round_seconds'] for row in own):.2f}",
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: Sequence[float], sign: str = "") -> str:
    """Return the mean and the standard deviation over seeds."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):{sign}.1f} ± {deviation:.1f}"


def plot(rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Draw the score of the shared model by round and by bytes, mean over seeds."""
    from itertools import accumulate

    from matplotlib import pyplot

    figure, sides = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for method in METHODS:
        own = [row for row in rows if row["method"] == method]
        if not own or method in OWN_MODELS:
            continue
        scores = [100 * statistics.fmean(values) for values in zip(*(row["scores"] for row in own), strict=True)]
        sent = [statistics.fmean(values) / 1e6 for values in zip(*(row["bytes"] for row in own), strict=True)]
        sides[0].plot(range(1, len(scores) + 1), scores, label=method)
        if method != "centralized":
            sides[1].plot(list(accumulate(sent)), scores, label=method)
    sides[0].set(xlabel="round", ylabel="exact match, %")
    sides[1].set(xlabel="MB sent and received", xscale="log")
    sides[0].legend()
    figure.savefig(out)


def best_rate(rows: Sequence[Mapping[str, Any]], method: str, key: str = "lr") -> float:
    """Return the rate with the best mean over the rounds on the clients' validation parts."""
    own = [row for row in rows if row["method"] == method]
    return max(own, key=lambda row: statistics.fmean(row["scores"]))[key]


def tuning_settings(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings to tune: the rates, and once FedAvg's rate is known, those of FedAdam's server."""
    shared = {"server_lr": None, "seed": TUNED_SEED}
    settings = [{"method": method, "lr": rate, **shared} for method, rates in RATES.items() for rate in rates]
    if all(any(row["method"] == "fedavg" and row["lr"] == rate for row in rows) for rate in RATES["fedavg"]):
        lr = best_rate(rows, "fedavg")
        settings += [{"method": "fedadam", "lr": lr, **shared, "server_lr": rate} for rate in SERVER_RATES]
    return settings


def study_settings(tuned: Sequence[Mapping[str, Any]], methods: Sequence[str], seeds: int) -> list[dict[str, Any]]:
    """Return the settings of the table, with the rates that tuning chose."""
    return [
        {
            "method": method,
            "lr": best_rate(tuned, method if method in RATES else "fedavg"),
            "server_lr": best_rate(tuned, "fedadam", "server_lr") if method == "fedadam" else None,
            "seed": seed,
        }
        for seed in range(seeds)
        for method in methods
    ]


def read(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; none if there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder written by prepare.py")
    parser.add_argument("--model", help="folder with SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, help="file for one JSON line per run; finished runs in it are kept")
    parser.add_argument(
        "--tune",
        action="store_true",
        help="run the rates on validation, with another seed; start it twice, since FedAdam needs FedAvg's rate",
    )
    parser.add_argument("--only", action="append", help="run this method and no other; can be repeated")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="runs in parallel")
    parser.add_argument("--table", type=Path, help="print the table of this file and do nothing else")
    parser.add_argument("--plot", type=Path, help="draw the figure of this file beside it and do nothing else")
    asked = parser.parse_args()
    if asked.table:
        print(table(read(asked.table)))
        return
    if asked.plot:
        plot(read(asked.plot), asked.plot.with_suffix(".svg"))
        return
    if not (asked.data and asked.model and asked.out):
        parser.error("give --data, --model and --out")
    if asked.tune:
        settings = tuning_settings(read(asked.out))
    else:
        settings = study_settings(read(TUNED), asked.only or list(METHODS), asked.seeds)
    done = [{key: row[key] for key in settings[0]} for row in read(asked.out)]
    left = [setting for setting in settings if setting not in done]
    with ProcessPoolExecutor(asked.jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(run_one, setting, asked.data, asked.model) for setting in left]
        for place, future in enumerate(as_completed(waiting), 1):
            row = future.result()
            with asked.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                f"{place}/{len(left)}: {row['method']} {row['lr']:g} {row['scores'][-1]:.3f} {row['seconds']} s",
                flush=True,
            )
    if not asked.tune:
        print(table(read(asked.out)))


if __name__ == "__main__":
    main()
