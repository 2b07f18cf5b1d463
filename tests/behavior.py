"""Record what runs compute, to the bit, and compare it after a change that must not change it.

    python tests/behavior.py write before.json
    python tests/behavior.py compare before.json

Digests depend on the machine and its libraries, so they are compared on one machine and not committed. They cover final
tensors, clients' states, losses, drift and bytes: for every method and composition on the toy federation, one client at
a time, in blocks of four and over packed messages; for some methods over Flower's messages; and for a run folder of
each kind. Names of fields do not count, only values in their order, so that a field can be renamed.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import image_fixtures
import torch
from example_fixtures import EXAMPLES, write_encoder, write_notes
from flower_fixtures import flower_engine, make_grid
from flwr.supercore.task_identity import TaskIdentity
from helpers import SMALL_TASK, SMALL_VIT, Clients, server_in, toy_model, toy_run
from method_options import BRIEF

from partita.core import tensors
from partita.core.optim import SGD, AdamW
from partita.core.rounds import RoundResult, rounds
from partita.engines.availability import Availability
from partita.engines.simulation import SimulationEngine
from partita.experiment import runner
from partita.experiment.config import load
from partita.methods import COMPOSITIONS, INDEX, NEEDS_FACTORS, build
from partita.record import file_names
from partita.testing.trial import states_of

FOUR = Clients(c0=3, c1=9, c2=12, c3=6)
ENGINES: dict[str, dict[str, Any]] = {"one by one": {}, "blocks of 4": {"block": 4}, "wire": {"wire": True}}
OVER_FLOWER = ("fedavg", "fedfrozen", "scaffold", "fedper", "safl", "quantize", "prune", "moon")
TIMES = ("seconds", "time", "started")
RUNS: dict[str, list[str]] = {
    "fedavg": [],
    "personal": ["method.name=fedper"],
    "frozen": ["method.name=fedfrozen", "method.warmup=1"],
    "private": ["privacy.epsilon=50.0", "privacy.clip=1.0", "privacy.repeatable=true"],
    "private clients": [
        "privacy.unit=client",
        "privacy.noise=1.0",
        "privacy.clip=1.0",
        "privacy.repeatable=true",
        "federation.cohort=0.9",
    ],
}


def digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def values(found: Any) -> Any:
    """Values in their order, without field names and times."""
    if isinstance(found, dict):
        return [values(part) for name, part in found.items() if not any(word in name for word in TIMES)]
    if isinstance(found, list | tuple):
        return [values(part) for part in found]
    return found


def digest_of_rounds(played: list[RoundResult]) -> str:
    told = [
        (
            each.cohort,
            [lost.client for lost in each.lost],
            sorted(each.traffic.up.items()),
            sorted(each.traffic.down.items()),
            each.loss,
            repr(values(vars(each.drift) if hasattr(each.drift, "__dict__") else each.drift)),
            [(client, sorted(names)) for client, names in each.sent.items()],
            [(client, dict(numbers)) for client, numbers in each.metrics.items()],
            dict(each.norms),
            each.skipped,
        )
        for each in played
    ]
    return digest(tensors.digest(played[-1].server.params), told)


def digests_of_methods() -> Iterator[tuple[str, str]]:
    for name in (*INDEX, *COMPOSITIONS):
        method = build(name, BRIEF.get(name.partition("+")[0], {}))
        model, population = (image_fixtures.small_vit(), image_fixtures.FOUR) if method.extend else (toy_model(), FOUR)
        if name in NEEDS_FACTORS:
            model, population = image_fixtures.adapted_vit(), image_fixtures.FOUR
        optimizer = AdamW(weight_decay=0.1) if method.supports_optimizer("adamw") else SGD()
        run = toy_run(method, 4, optimizer, 0.02)
        model = method.extend(model, run.key / "model") if method.extend else model
        if method.pool:
            population = _pooled(population)
        availability = Availability() if method.pool else Availability(straggler_rate=0.3)
        for kind, options in ENGINES.items():
            engine = SimulationEngine(run, model, population, availability=availability, **options)
            played = list(rounds(run, model, engine))
            states = {client: tensors.digest(part) for client, part in states_of(run, engine).items()}
            yield f"{name}, {kind}", digest(digest_of_rounds(played), states)


def _pooled(population: Any) -> Any:
    class Pooled:
        clients = population.clients[-1:]

        def __getitem__(self, client: str) -> Any:
            return population[client]

    return Pooled()


def digests_of_flower() -> Iterator[tuple[str, str]]:
    for name in ("_task_id", "_run_id", "_node_id"):
        setattr(TaskIdentity, name, 1)
    for name in OVER_FLOWER:
        run, model = toy_run(build(name, {"k": 1} if name == "safl" else {}), 3), toy_model()
        with tempfile.TemporaryDirectory() as folder:
            grid = make_grid(run, model, FOUR, Path(folder))
            played = list(rounds(run, model, flower_engine(run, model, grid, FOUR.clients, deadline=60.0)))
        yield f"{name}, flower", digest_of_rounds(played)


def digests_of_folders() -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "small.toml").write_text(f'rounds = 3\n[method]\nname = "fedavg"\n{SMALL_VIT}{SMALL_TASK}')
        torch.manual_seed(0)
        paths = [f"data.path={write_notes(folder / 'notes')}", f"model.path={write_encoder(folder / 'model')}"]
        configs = {kind: load(folder / "small.toml", changes) for kind, changes in RUNS.items()}
        configs["tokens"] = load(EXAMPLES / "clinical.toml", [*paths, "rounds=2", "method.k=2"])
        for kind, config in configs.items():
            yield f"run folder: {kind}", _digest_of_folder(config, folder / kind)


def _digest_of_folder(config: Any, folder: Path) -> str:
    rows = [values(row) for row in runner.start(config, folder)]
    server = server_in(folder)
    plan = values(json.loads((folder / file_names.PLAN).read_text()))
    return digest(tensors.digest(server.params), json.dumps(rows), json.dumps(plan))


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "compare"):
        sys.exit(__doc__)
    torch.set_num_threads(1)
    file, found = Path(sys.argv[2]), {}
    for part in (digests_of_methods(), digests_of_flower(), digests_of_folders()):
        for name, value in part:
            found[name] = value
    if sys.argv[1] == "write":
        file.write_text(json.dumps(found, indent=1))
        print(f"{len(found)} digests written to {file}")
        return
    before = json.loads(file.read_text())
    wrong = [name for name in before.keys() | found.keys() if before.get(name) != found.get(name)]
    print(f"{len(found) - len(wrong)} of {len(before)} digests are equal", *sorted(wrong), sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
