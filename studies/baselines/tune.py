"""One setting of each method, chosen on the clients' validation parts with a seed that the study does not use.

python studies/baselines/tune.py            all methods
python studies/baselines/tune.py feddyn     one of them
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from partita.core.data import Batch
from partita.core.rounds import make_job, rounds
from partita.engines.simulation import SimulationEngine
from partita.evaluation import score
from partita.experiment.builder import Experiment, build
from partita.experiment.config import load

CONFIG = Path(__file__).with_name("digits.toml")
SEED = 100
GRID: dict[str, list[dict[str, Any]]] = {  # a method, and what distinguishes it from another row with its name
    "fedavg": [{"training.lr": rate} for rate in (0.01, 0.02, 0.03, 0.05, 0.1)],
    "fedprox": [{"method.mu": mu} for mu in (0.001, 0.01, 0.1)],
    "scaffold": [{"training.lr": rate} for rate in (0.01, 0.02, 0.03, 0.05)],
    "feddyn": [{"method.alpha": alpha} for alpha in (0.01, 0.03, 0.1, 0.3, 1.0)],
    "scaffold by examples": [{"method.weigh": "examples", "training.lr": rate} for rate in (0.01, 0.02, 0.03, 0.05)],
    "feddyn by examples": [
        {"method.weigh": "examples", "method.alpha": alpha} for alpha in (0.01, 0.03, 0.1, 0.3, 1.0)
    ],
    "moon": [{"method.mu": mu} for mu in (0.1, 1.0, 5.0)],
    "fedavgm": [{"method.beta": beta} for beta in (0.5, 0.7, 0.9)],
    "fedadam": [{"method.lr": rate} for rate in (0.003, 0.01, 0.03)],
    "fedyogi": [{"method.lr": rate} for rate in (0.01, 0.03, 0.1)],
    "fedadagrad": [{"method.lr": rate} for rate in (0.003, 0.01, 0.03)],
    "fedtp": [{"method.lr": rate} for rate in (0.01, 0.05, 0.2)],
    "lora": [{"training.lr": rate} for rate in (0.1, 0.2, 0.4)],
    "flora": [{"training.lr": rate} for rate in (0.03, 0.05, 0.1)],
}


class Validation:
    """All clients' validation parts as one."""

    def __init__(self, experiment: Experiment) -> None:
        clients = experiment.federation.clients
        parts = [experiment.federation[client].validation for client in clients]
        batches = [part.take(torch.arange(len(part))) for part in parts if len(part)]
        self.inputs = {name: torch.cat([batch.inputs[name] for batch in batches]) for name in batches[0].inputs}
        self.targets = torch.cat([batch.targets for batch in batches])

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: torch.Tensor) -> Batch:
        return Batch({name: value[indices] for name, value in self.inputs.items()}, self.targets[indices])


def validate(method: str, setting: dict[str, Any]) -> float:
    """The mean over the last five rounds, since single rounds jump."""
    changes = [
        f"method.name={method.partition(' ')[0]}",
        f"seed={SEED}",
        *(f"{key}={value}" for key, value in setting.items()),
    ]
    experiment = build(load(CONFIG, changes))
    run, model = experiment.run, experiment.model
    engine = SimulationEngine(
        run, model, experiment.federation, experiment.block, experiment.device, availability=experiment.availability
    )
    examples, found = Validation(experiment), []
    for each in rounds(run, model, engine):
        if each.number >= run.rounds - 5:
            if method == "fedtp":
                jobs = (
                    make_job(run, model, each.server, each.number, client)[0]
                    for client in experiment.federation.clients
                )
                scores = [score["accuracy"] for _, score in engine.evaluate(jobs, examples)]
                found.append(sum(scores) / len(scores))
            else:
                found.append(score(model, each.server.params, examples)["accuracy"])
    return sum(found) / len(found)


def main() -> None:
    for method in sys.argv[1:] or GRID:
        for setting in GRID[method]:
            print(method, setting, f"{100 * validate(method, setting):.1f}", flush=True)


if __name__ == "__main__":
    main()
