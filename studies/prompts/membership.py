"""Who was in the training data? What travels of pFedDC and what travels of FedAvg, attacked in the same way.

python studies/prompts/membership.py --pair pair --out studies/prompts/membership.json
python studies/prompts/membership.py --tiny --out FILE      random towers and made-up images, in seconds

pFedDC learns prompts beside the frozen pair; FedAvg trains the pair's whole tower of images under a linear head.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModel

from partita.core.client import ClientState, client_params
from partita.core.data import Examples
from partita.core.rounds import make_job, rounds
from partita.core.update import Update
from partita.engines.simulation import SimulationEngine
from partita.experiment.builder import build
from partita.experiment.config import parse
from partita.models.functional import without_logs
from partita.privacy.canaries import first, gradient_cosines, losses_of
from partita.privacy.membership import Array, roc

FULL = {"optimizer": "adamw", "lr": 1e-4, "weight_decay": 0.01, "batch_size": 32, "epochs": 1}
TINY = {
    "data": {"name": "synthetic", "examples": 120, "test_examples": 40, "size": 8},
    "split": {"name": "iid", "clients": 2},
    "training": {"batch_size": 8},
}
Found = dict[str, Any]
Scores = dict[str, list[tuple[Array, Array]]]  # by attack, of each client: members', outsiders'


def arms(pair: Path, data: Path, folder: Path) -> dict[str, Found]:
    """The config of each method on Office-Caltech10, four domains of three clients each."""
    shared = tomllib.loads((Path(__file__).parent / "office.toml").read_text())
    shared["data"]["path"] = str(data / "office_caltech10")
    with without_logs():
        AutoModel.from_pretrained(pair).vision_model.float().save_pretrained(folder)
    whole = {"model": {"name": "pretrained", "path": str(folder)}, "method": {"name": "fedavg"}, "training": FULL}
    # In the precision of FedAvg's model: what is attacked are gradients.
    prompts = {"model": {"name": "clip", "path": str(pair)}, "method": {"name": "pfeddc"}}
    return {"pfeddc": {**shared, **prompts}, "fedavg": {**shared, **whole}}


def tiny() -> dict[str, Found]:
    prompts = {
        "model": {"name": "clip", "shape": "tiny"},
        "method": {"name": "pfeddc", "text_tokens": 2, "vision_tokens": 2},
    }
    whole = {"model": {"name": "vit", "width": 8, "heads": 2}, "method": {"name": "fedavg"}}
    return {"pfeddc": {**TINY, **prompts}, "fedavg": {**TINY, **whole}}


def attack(config: Found, seed: int, numbers: int, most: int, device: str) -> list[Found]:
    """After so many rounds, each client sends one more update, and its examples are told from held-out ones.

    By their loss, and by the cosine of their gradient with the update. The attacker holds what travels, and takes what
    clients keep as it was loaded; where clients keep something, one who knows that too is tried beside.
    """
    # For images of another size than a tower knows, the way back to its places has no deterministic form on GPUs.
    engine_table = {"device": device, "clients_per_block": 1, "deterministic": False}
    experiment = build(parse({**config, "seed": seed, "rounds": numbers, "engine": engine_table}))
    run, model, federation = experiment.run, experiment.model, experiment.federation
    engine = SimulationEngine(run, model, federation, device=experiment.device)
    *_, last = rounds(run, model, engine)
    scores: dict[str, Scores] = {}
    sent = 0
    for client in federation.clients:
        data = federation[client]
        job, plan = make_job(run, model, last.server, numbers - 1, client)
        states = {"what travels": ClientState()}
        if plan.keep:
            states["own parts too"] = engine.store.load(client, numbers)
        [update] = engine.train([job])
        if not isinstance(update, Update):
            raise RuntimeError(f"{client} sent no update")
        sent = sum(value.numel() for value in update.delta.values())
        outside = [part for part in (data.validation, data.test) if len(part)]
        for knows, state in states.items():
            _, params = client_params(run, model, job, state)

            def by_loss(part: Examples, params: Any = params) -> Array:
                return -losses_of(model, params, part, most)

            def by_update(part: Examples, params: Any = params, delta: Any = update.delta) -> Array:
                return np.asarray(gradient_cosines(model, params, delta, first(part, most)).double())

            for name, score in ("loss", by_loss), ("update", by_update):
                both = score(data.train), np.concatenate([score(part) for part in outside])
                scores.setdefault(knows, {}).setdefault(name, []).append(both)
    facts = {"seed": seed, "parameters_sent": sent}
    return [
        {**facts, "knows": knows, **{name: _told(parts) for name, parts in by.items()}} for knows, by in scores.items()
    ]


def _told(parts: list[tuple[Array, Array]]) -> Found:
    about = roc(*(np.concatenate([part[side] for part in parts]) for side in (0, 1))).about()
    return {"auc": about["auc"], "true_at_1%": about["true_at_1%"]}


def summary(rows: Sequence[Found]) -> list[Found]:
    """Mean and standard deviation over seeds, by method, by what the attacker knows, and by attack."""
    found = []
    for method, knows in sorted({(row["method"], row["knows"]) for row in rows}):
        mine = [row for row in rows if (row["method"], row["knows"]) == (method, knows)]
        for name in ("loss", "update"):
            line: Found = {"method": method, "knows": knows, "attack": name}
            for figure in ("auc", "true_at_1%"):
                values = np.array([row[name][figure] for row in mine])
                line[figure] = round(float(values.mean()), 4)
                line[f"{figure}_std"] = round(float(values.std(ddof=1)), 4) if len(values) > 1 else None
            found.append(line)
    return found


def main(given: Sequence[str] | None = None) -> Found:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pair", type=Path, help="the folder that studies/backbone/align.py wrote")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="where office_caltech10 is")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=["pfeddc", "fedavg"], choices=["pfeddc", "fedavg"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=int, default=64, help="examples of each part of a client that are scored")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="one step of 4 examples a round: to see that it runs")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args(given)
    if not asked.tiny and asked.pair is None:
        parser.error("give --pair, or --tiny")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        configs = tiny() if asked.tiny else arms(asked.pair, asked.data, Path(folder))
        if asked.quick:
            configs = {name: {**each, "training": {"batch_size": 4, "steps": 1}} for name, each in configs.items()}
        for seed in range(asked.seeds):
            for method in asked.methods:
                start = time.perf_counter()
                found = attack(configs[method], seed, asked.rounds, asked.most, asked.device)
                seconds = round(time.perf_counter() - start, 1)
                rows += [{"method": method, **row, "seconds": seconds} for row in found]
                print(json.dumps(rows[-len(found) :]), flush=True)
    result = {"rounds": asked.rounds, "most": asked.most, "summary": summary(rows), "runs": rows}
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
