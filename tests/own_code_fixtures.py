"""A user's own file: a method with a server rule, a task, a model, a split, metrics and a tracker."""

from __future__ import annotations

from pathlib import Path

MINE = '''"""Half: the server moves a part of the way to the mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

import partita
from partita.core.options import Count, PositiveShare
from partita.core.sampling import Uniform
from partita.data import Table, Task


@dataclass(frozen=True)
class PartOfTheWay(partita.ServerRule):
    share: float = 0.5

    def reduce(self, server: Any, updates: Iterable[Any], population: int) -> Any:
        aggregate = partita.average(updates)
        return replace(aggregate, delta={name: self.share * part for name, part in aggregate.delta.items()})


def half(share: Annotated[PositiveShare, "how far the server moves"] = 0.5) -> partita.Method:
    """Build the method."""
    return partita.Method("half", server_rule=PartOfTheWay(share))


def stripes(key: partita.Key, examples: Annotated[Count, "number of images"] = 120) -> Task:
    """Images whose bright row is their class."""

    def part(key: partita.Key, count: int) -> Table:
        draws = np.random.default_rng(key.seed())
        targets = torch.tensor(draws.integers(0, 4, count))
        pixels = torch.tensor(draws.normal(size=(count, 1, 4, 4)), dtype=torch.float32) * 0.3
        pixels[torch.arange(count), 0, targets] += 1.0
        return Table({"pixel_values": pixels}, targets)

    return Task(
        "stripes", part(key / "train", examples), part(key / "test", 40), ("a", "b", "c", "d"), channels=1, size=4
    )


def in_turn(task: Task, key: partita.Key, sites: Annotated[Count, "number of sites"] = 3) -> dict[str, Any]:
    """Deal the rows to sites in turn."""
    return {f"site-{place}": range(place, len(task.train), sites) for place in range(sites)}


@dataclass(frozen=True)
class TakeTurns(Uniform):
    name: ClassVar[str] = "take_turns"

    def draw(self, key: Any, round: int, clients: Any, size: int, info: Any) -> list[str]:
        return [clients[(round * size + place) % len(clients)] for place in range(size)]


def take_turns() -> TakeTurns:
    return TakeTurns()


def top2(logits: Tensor, targets: Tensor) -> float:
    return float((logits.topk(2).indices == targets[:, None]).any(1).double().mean())


@partita.metric(higher_is_better=False, fraction=False)
def wrong(logits: Tensor, targets: Tensor) -> float:
    return float((logits.argmax(1) != targets).sum())


def log(config: Any, folder: Path) -> Any:
    def track(row: Any) -> None:
        with (folder / "tracked.txt").open("a") as file:
            file.write(f"{config['label']} {row['round']}\\n")

    return track
'''

CONFIG = """
rounds = 3
[method]
name = "mine.py:half"
share = 0.75
[data]
name = "mine.py:stripes"
[split]
name = "mine.py:in_turn"
sites = 2
[model]
name = "vit"
layers = 1
width = 8
heads = 2
patch = 2
[training]
optimizer = "sgd"
lr = 0.5
[evaluate]
metrics = ["mine.py:top2", "mine.py:wrong"]
[track]
to = ["mine.py:log"]
[engine]
clients_per_block = 1
threads = 1
"""


def write_own_code(folder: Path, config: str = CONFIG, code: str = MINE) -> Path:
    """Write the file and a config that names it; return the config's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.py").write_text(code)
    (folder / "own.toml").write_text(config)
    return folder / "own.toml"
