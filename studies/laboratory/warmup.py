"""The automatic warm-up against the best fixed one, found by trying all, in the linear-attention laboratory.

python studies/laboratory/warmup.py                 the evaluation grid; writes warmup.csv beside this file
python studies/laboratory/warmup.py --development   the development grid, for several constants of the rule
"""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from inspect import signature
from itertools import product
from pathlib import Path

import torch
from linear_attention.simulate import (
    Setting,
    Trace,
    automatic_warmup,
    losses_by_warmup,
    sharpness,
    step_size,
    threshold_by_clients,
    warm_up,
)
from linear_attention.synthetic import Differences, Size, draw, stack
from linear_attention.theory import feature_map
from torch import Tensor

from partita.core.rng import Key
from partita.methods.fedfrozen import fedfrozen

ROUNDS = 60
DEFAULTS = {name: each.default for name, each in signature(fedfrozen).parameters.items()}
SCALE = {"identity": 1.0, "relu": 0.5, "elu": 3.0}  # of the rates: the maps differ in how fast a kernel may be learned
KINDS = {
    "mixed": Differences(),
    "kernel": Differences(rotation=0.5, value=0.1, kernel=1.0),
    "value": Differences(rotation=0.3, value=1.0, kernel=0.1),
    "rotation": Differences(rotation=1.5, value=0.1, kernel=0.1),
}


@dataclass(frozen=True)
class Grid:
    maps: tuple[str, ...]
    kinds: tuple[str, ...]
    rates: tuple[float, ...]
    steps: tuple[int, ...]
    levels: tuple[float, ...]
    seeds: tuple[int, ...]
    clients: tuple[int, ...]


ALL = tuple(SCALE)
DEVELOPMENT = Grid(ALL, ("mixed", "kernel"), (0.1, 0.25), (5, 20, 40), (0.25, 1.0, 2.0), (100, 101, 102, 103), (8,))
EVALUATION = Grid(ALL, tuple(KINDS), (0.07, 0.17), (10, 30), (0.5, 1.5), (1000, 1001), (5, 12))
HARD = Grid(
    ("identity", "relu"), ("mixed", "kernel"), (0.15, 0.3), (25, 50), (0.75, 3.0), tuple(range(2000, 2006)), (6,)
)


@dataclass(frozen=True)
class Result:
    """One batch of the grid: settings that differ in level and seed."""

    about: list[tuple[object, ...]]
    trace: Trace
    weight: Tensor  # (run, client)
    losses: Tensor  # (warm-up, run)
    stable: Tensor  # (run,)

    def automatic(self, threshold: float | None, patience: int) -> Tensor:
        """The warm-up that the automatic rule chooses, (run,); None for the default threshold."""
        used = threshold_by_clients(self.weight) if threshold is None else threshold
        return automatic_warmup(self.trace, used, patience)


def play(grid: Grid) -> list[Result]:
    results = []
    for name, kind, rate, steps, clients in product(grid.maps, grid.kinds, grid.rates, grid.steps, grid.clients):
        features, size = feature_map(name, Size().rank), Size(clients=clients)
        pairs = list(product(grid.levels, grid.seeds))
        world = stack([draw(Key(seed) / clients, level, features, size, KINDS[kind]) for level, seed in pairs])
        setting = Setting(step_size(world, rate * SCALE[name], features), steps, ROUNDS)
        trace = warm_up(world, setting, features)
        losses = losses_by_warmup(world, trace, setting, features)
        stable = losses.isfinite().all(0) & (sharpness(world, trace, setting, features) < 2)
        about = [(name, kind, rate, steps, clients, level, seed) for level, seed in pairs]
        results.append(Result(about, trace, world.data.weight, losses, stable))
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def line(label: str, losses: Tensor, chosen: Tensor) -> str:
    """A row of the table: losses (warm-up, setting), chosen (setting,)."""
    best, never = losses.amin(0), losses[-1]
    got = losses.gather(0, chosen[None])[0]
    hot = never > 1.01 * best
    gained = ((never - got) / (never - best))[hot].clamp(min=-1)
    cells = [
        f"{100 * (got <= 1.1 * best).double().mean():.1f}%",
        f"{100 * (got / best - 1).median():.2f}%",
        f"{100 * (got > 1.02 * never).double().mean():.1f}%",
        f"{100 * (got / never - 1).amax():+.1f}%",
        f"{100 * (got / never).log().mean():+.2f}%",
        f"{100 * gained.mean():.0f}%",
        f"{100 * (chosen < ROUNDS).double().mean():.0f}%",
        f"{100 * (1 - chosen.double() / ROUNDS).mean():.0f}%",
    ]
    return f"| {label} | {' | '.join(cells)} |"


COLUMNS = (
    "within 10% of best", "median above best", "worse than never by >2%", "worst against never", "mean against never",
    "of the possible gain", "froze", "rounds frozen",
)  # fmt: skip
HEADER = f"| warm-up | {' | '.join(COLUMNS)} |\n| :-- |{' --: |' * len(COLUMNS)}"


def table(results: list[Result], rules: dict[str, tuple[float | None, int]]) -> str:
    stable = torch.cat([each.stable for each in results])
    losses = torch.cat([each.losses for each in results], 1)[:, stable]
    never, best = losses[-1], losses.amin(0)
    hot = [int((never > factor * best).sum()) for factor in (1.01, 1.1)]
    rows = [
        f"{len(stable)} settings, {int(stable.sum())} of them stable; never freezing is more than 1% above the best in "
        f"{hot[0]} of these, more than 10% in {hot[1]}.",
        "",
        HEADER,
    ]
    for label, (threshold, patience) in rules.items():
        chosen = torch.cat([each.automatic(threshold, patience) for each in results])[stable]
        rows.append(line(label, losses, chosen))
    for fraction in (0.1, 0.3, 0.5, 0.8, 1.0):
        label = f"fixed, {fraction}" if fraction < 1 else "never"
        rows.append(line(label, losses, torch.full_like(chosen, round(fraction * ROUNDS))))
    rows.append(line("best, by trying all", losses, losses.argmin(0)))
    return "\n".join(rows)


FIELDS = (
    "map", "kind", "rate", "steps", "clients", "level", "seed", "stable", "best", "auto",
    "loss_best", "loss_auto", "loss_never", "loss_0.3",
)  # fmt: skip


def write(results: list[Result], path: Path) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(FIELDS)
        for each in results:
            auto = each.automatic(None, DEFAULTS["patience"])
            best = each.losses.nan_to_num(torch.inf).argmin(0)
            for place, about in enumerate(each.about):
                column = each.losses[:, place]
                warmups = (int(best[place]), int(auto[place]), ROUNDS, round(0.3 * ROUNDS))
                found = [f"{float(column[warmup]):.6g}" for warmup in warmups]
                rows.writerow([*about, int(each.stable[place]), *warmups[:2], *found])


def main() -> None:
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["--development"]:
            rules: dict[str, tuple[float | None, int]] = {
                f"auto, {c:g}, {p}": (c, p) for c, p in product((5.0, 10.0, 14.0, 17.0, 20.0, 30.0), (1, 3, 5))
            }
            print(table(play(DEVELOPMENT), rules))
        case []:
            evaluate(EVALUATION, "warmup.csv")
        case ["--hard"]:
            evaluate(HARD, "warmup-hard.csv")
        case _:
            raise SystemExit(__doc__)


def evaluate(grid: Grid, file: str) -> None:
    results = play(grid)
    write(results, Path(__file__).with_name(file))
    print(table(results, {"auto": (None, DEFAULTS["patience"]), "auto, threshold 17": (17.0, 3)}))


if __name__ == "__main__":
    main()
