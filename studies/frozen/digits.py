"""Play digits.toml with the common warm-up computed once: frozen runs start from the one that never freezes.

    python studies/frozen/digits.py SETTING...    plays what digits.jsonl lacks, seed by seed, and adds lines to it
    python studies/frozen/digits.py --all
    python studies/frozen/digits.py --table

The results equal those of whole runs bit for bit; `--check` plays one both ways.
"""

from __future__ import annotations

import copy
import json
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from partita.core.method import Server
from partita.core.rounds import initial_server, rounds
from partita.core.tensors import Tensors
from partita.evaluation import score
from partita.experiment.builder import Experiment, build, build_engine
from partita.experiment.config import apply_override, parse, read_toml
from partita.storage.client_store import MemoryStore

HERE = Path(__file__).parent
STUDY = tomllib.loads((HERE / "digits.toml").read_text())
LINES = HERE / "digits.jsonl"
SETTINGS: dict[str, dict[str, Any]] = STUDY["axes"]["setting"]
FIXED: dict[str, float] = {name: float(name) for name in STUDY["arms"] if name[0].isdigit()}
Fork = tuple[Tensors, MemoryStore]  # the server's weights and the clients' state after a round


def experiment(setting: str, seed: int, method: dict[str, Any], federation: Any = None, count: int = 0) -> Experiment:
    raw = read_toml(HERE / STUDY["config"])
    change = dict(SETTINGS[setting])
    for key in change.pop("remove", []):
        table, _, name = key.partition(".")
        del raw[table][name]
    for key, value in change.items():
        apply_override(raw, f"{key}={json.dumps(value)}")
    raw = {**raw, "seed": seed, "method": method, "rounds": count or raw["rounds"]}
    raw["engine"] = {"threads": 1}
    return build(parse(raw), federation=federation)


def play(built: Experiment, start: int = 0, fork: Fork | None = None) -> tuple[list[dict[str, float]], list[Fork], int]:
    """Play the rounds from `start`: the scores after each, the state after each, and the round of freezing."""
    run, model = built.run, built.model
    server = initial_server(run, model)
    store = MemoryStore()
    if fork is not None:
        server, store = Server(fork[0], server.state, server.versions), copy.deepcopy(fork[1])
    engine = build_engine(built, store)
    scores, forks, frozen = [], [], run.rounds
    for result in rounds(run, model, engine, server, start):
        scores.append(score(model, result.server.params, built.federation.test, built.evaluator))
        forks.append((result.server.params, copy.deepcopy(store)))
        signal = float(result.server.state.get("warmup", {}).get("frozen", 0.0))
        frozen = min(frozen, result.round + 1) if signal else frozen
    return scores, forks, frozen


def play_all(setting: str, seed: int, arms: list[str]) -> None:
    """Play the arms of one setting and seed. The automatic run is the one that never freezes until it does."""
    auto = experiment(setting, seed, {"name": "fedfrozen", "warmup": "auto"})
    people, count = auto.federation, auto.run.rounds
    scores, forks, frozen = play(auto)
    write(setting, seed, "auto", scores, frozen)
    if frozen < count:
        more, ends, _ = play(experiment(setting, seed, {"name": "fedavg"}, people), frozen, forks[frozen - 1])
        scores, forks = scores[:frozen] + more, forks[:frozen] + ends
    write(setting, seed, "never", scores, count)
    for arm in arms:
        warmup = round(FIXED[arm] * count)
        method = {"name": "fedfrozen", "warmup": FIXED[arm]}
        more, _, _ = play(experiment(setting, seed, method, people), warmup, forks[warmup - 1])
        write(setting, seed, arm, scores[:warmup] + more, warmup)


def check() -> None:
    """Stop if a run that starts from a fork differs from a whole one, with moments that clients keep."""
    setting, method = "labels, 3 clients, moments kept", {"name": "fedfrozen", "warmup": 1}
    whole, _, _ = play(experiment(setting, 9, method, count=3))
    never = experiment(setting, 9, {"name": "fedavg"}, count=3)
    scores, forks, _ = play(never)
    part, _, _ = play(experiment(setting, 9, method, never.federation, 3), 1, forks[0])
    assert whole == scores[:1] + part, (whole, scores, part)
    assert whole[-1] != scores[-1], "freezing changed nothing, so nothing was compared"
    print("forked and whole runs agree")


def write(setting: str, seed: int, arm: str, scores: list[dict[str, float]], frozen: int) -> None:
    test = {name: [round(each[name], 5) for each in scores] for name in ("accuracy", "loss")}
    line = {
        "study": "digits", "kind": "run", "arm": arm, "point": {"setting": setting}, "seed": seed, "chosen": {},
        "edge": [], "score": STUDY["score"], "test": {"rounds": list(range(1, len(scores) + 1)), **test},
        "frozen_after": frozen, "torch": torch.__version__,
    }  # fmt: skip
    with LINES.open("a") as file:
        file.write(json.dumps(line) + "\n")


def lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.exists() else []


def table() -> str:
    """Means over the last rounds, paired differences to never freezing, Holm within a setting."""
    rows = ["| setting | warm-up | seeds | accuracy, % | within a run | to never, paired [95%] | p (Holm) |"]
    rows.append("| :-- | :-- | --: | --: | --: | --: | --: |")
    for setting in SETTINGS:
        found: dict[str, dict[int, Any]] = {}
        for line in lines():
            if line["point"]["setting"] == setting:
                tail = 100 * np.array(line["test"]["accuracy"][-STUDY["last"] :])
                found.setdefault(line["arm"], {})[line["seed"]] = tail
        never = found.get("never", {})
        tests = {}
        for arm in (name for name in STUDY["arms"] if name in found and name != "never"):
            seeds = sorted(found[arm].keys() & never.keys())
            away = np.array([found[arm][seed].mean() - never[seed].mean() for seed in seeds])
            tests[arm] = (away, stats.ttest_1samp(away, 0).pvalue if len(away) > 1 and away.std() > 0 else 1.0)
        holm, largest = {}, 0.0
        for place, (arm, (_, p)) in enumerate(sorted(tests.items(), key=lambda each: each[1][1])):
            largest = max(largest, min(1.0, (len(tests) - place) * p))
            holm[arm] = largest
        for arm in (name for name in STUDY["arms"] if name in found):
            means = np.array([tail.mean() for tail in found[arm].values()])
            within = np.mean([tail.std(ddof=1) for tail in found[arm].values()])
            cells = [setting, arm, str(len(means)), f"{means.mean():.1f} ± {means.std(ddof=1):.1f}", f"{within:.1f}"]
            away = tests[arm][0] if arm in tests else np.zeros(1)
            if not away.any():
                cells += ["–" if arm == "never" else "never froze", "–"]
            else:
                low, high = stats.t.interval(0.95, len(away) - 1, away.mean(), stats.sem(away))
                cells += [f"{away.mean():+.1f} [{low:.1f}, {high:.1f}]", f"{holm[arm]:.2g}"]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["--table"]:
            print(table())
        case ["--check"]:
            check()
        case [*settings] if settings:
            wanted = list(SETTINGS) if settings == ["--all"] else settings
            for setting in wanted:
                for seed in STUDY["seeds"]:
                    if any((each["point"]["setting"], each["seed"]) == (setting, seed) for each in lines()):
                        continue
                    began = time.process_time()
                    play_all(setting, seed, [arm for arm in FIXED if arm != "0.1" or setting == next(iter(SETTINGS))])
                    print(f"{setting}, seed {seed}: {time.process_time() - began:.0f} s of one core", flush=True)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
