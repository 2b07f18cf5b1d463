"""Where freezing the kernel helps: the number of clients in the mean, the local steps, and how clients differ.

    python studies/laboratory/clients.py run            every cell of the map; writes clients.csv
    python studies/laboratory/clients.py partial        3 of 20 clients a round; writes partial.csv
    python studies/laboratory/clients.py table          the tables, from these files
    python studies/laboratory/clients.py plot           the map, clients.png
    python studies/laboratory/clients.py rules          constants of the automatic rule on the development worlds
    python studies/laboratory/clients.py rules --test   the same on the test worlds

Many local steps are affordable because the steps are C (steps.c, compiled with cc on the first use): with the identity
map a client's loss is a quadratic function of B[i, jk, o] = A[i, j] W[k, o] + [j != k] A[i, k] W[j, o], j <= k, with
A = Q K'. Its matrix E[S[i, i'] S[jk] S[j'k']] and vector E[S[jk] (H'Y)[i, o]], S = H'H, are computed once. Each start
checks it against `partita.lab.simulate.warm_up`.
"""

from __future__ import annotations

import csv
import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from partita.core.rng import Key
from partita.lab import simulate
from partita.lab.experiments import SEARCH
from partita.lab.simulate import Setting, Trace, automatic_warmup, step_size
from partita.lab.synthetic import Differences, Federation, Size, draw, stack
from partita.lab.theory import Kernel, Moments, feature_map, loss, moments, profile, ridged
from partita.methods.fedfrozen import fedfrozen

HERE = Path(__file__).parent
ROUNDS, RATE, RIDGE = 60, 0.15, 0.01
IDENTITY = feature_map("identity", Size().rank)
KINDS = {
    "kernel": Differences(rotation=0.5, value=0.1, kernel=1.0),
    "value": Differences(rotation=0.3, value=1.0, kernel=0.1),
    "rotation": Differences(rotation=1.5, value=0.1, kernel=0.1),
    "mixed": Differences(),
}
CLIENTS = (2, 3, 5, 12, 30)
STEPS = (20, 100, 300)
LEVELS = (1.0, 3.0)
MANY = ("kernel", "mixed")  # the kinds that are played with thirty clients too
WORLDS = range(42000, 42064)  # the first half is for the development of the automatic rule
SHARES = (0.0, 0.1, 0.2, 0.3, 0.5, 0.8)
TAIL = 15  # rounds at the end whose mean counts under partial participation
POPULATION, COHORT = 20, 3
Numbers = NDArray[np.float64]


@cache
def _library() -> Any:
    folder = Path(tempfile.mkdtemp())
    built = folder / "steps.so"
    subprocess.run(["cc", "-O3", "-march=native", "-shared", "-fPIC", HERE / "steps.c", "-o", built], check=True)
    return ctypes.CDLL(str(built))


@dataclass(frozen=True)
class Products:
    """Moments of each client's examples for products of weights: matrix (run, client, 40, 40), vector (.., 2, 40)."""

    matrix: Tensor
    vector: Tensor

    def of_clients(self, clients: Tensor) -> Products:
        """The moments of a cohort, positions (run, client)."""
        runs = torch.arange(len(clients))[:, None]
        return Products(self.matrix[runs, clients], self.vector[runs, clients])


def products_of(world: Federation) -> Products:
    inputs, targets, share = world.data.inputs, world.data.targets, world.data.share
    gram = inputs.transpose(-1, -2) @ inputs  # (run, client, example, width, width)
    first, second = torch.triu_indices(gram.shape[-1], gram.shape[-1])
    pairs = gram[..., first, second]
    weighted = pairs * share[..., None]
    left = torch.einsum("rcei,rces->rcise", gram.flatten(-2), weighted).flatten(2, 3)  # (run, client, ii' s, example)
    matrix = (left @ pairs).unflatten(2, (4, 4, 10)).transpose(3, 4).reshape(*share.shape[:2], 40, 40)
    vector = torch.einsum("rces,rceio->rcois", weighted, inputs.transpose(-1, -2) @ targets).flatten(-2)
    return Products(matrix.contiguous(), vector.contiguous())


def local(means: Products, before: Sequence[Tensor], setting: Setting) -> list[Tensor]:
    """The clients' query, key and value weights after their local steps, (run, client, width, column)."""
    runs, clients = means.matrix.shape[:2]
    own = [weights.unsqueeze(1).repeat(1, clients, 1, 1).contiguous() for weights in before]
    assert isinstance(setting.lr, Tensor)
    rate = setting.lr[:, None].repeat(1, clients).contiguous()
    pointers = [ctypes.c_void_p(value.data_ptr()) for value in (rate, means.matrix, means.vector, *own)]
    steps, ridge = ctypes.c_long(setting.steps), ctypes.c_double(setting.ridge)
    _library().train(ctypes.c_long(runs * clients), steps, ridge, *pointers)
    return own


def play(
    world: Federation, setting: Setting, cohorts: Sequence[Tensor] | None = None, means: Products | None = None
) -> Trace:
    """FedAvg that trains everything, with all clients or with a cohort (run, client) in each round."""
    means, weight = means or products_of(world), world.data.weight
    path, spreads = [[*world.kernel, world.value]], []
    for round in range(setting.rounds):
        part, share = means, weight
        if cohorts is not None:
            part, share = means.of_clients(cohorts[round]), weight.gather(1, cohorts[round])
            share = share / share.sum(-1, keepdim=True)
        after = local(part, path[-1], setting)
        path.append([(share[..., None, None] * weights).sum(1) for weights in after])
        away = [
            (own - mean[:, None]).square().sum((-1, -2)) for own, mean in zip(after[:2], path[-1][:2], strict=True)
        ]
        spreads.append((share * (away[0] + away[1])).sum(-1))
    query, key, value = (torch.stack(weights) for weights in zip(*path, strict=True))
    return Trace(Kernel(query, key), value, torch.stack(spreads))


def maps(means: Moments, share: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    """`theory.round_map` with doubling in place of a loop over the steps; leading dimensions are free."""
    curvature = ridged(means.gram, setting.ridge)
    assert isinstance(setting.lr, Tensor)
    lr = setting.lr[..., None, None, None]
    eye = torch.eye(curvature.shape[-1], dtype=curvature.dtype)
    shrink = eye - lr * curvature
    power, gain = eye.expand_as(curvature), torch.zeros_like(curvature)
    for bit in bin(setting.steps)[2:]:  # from n steps to 2n, and to 2n + 1
        gain, power = gain + power @ gain, power @ power
        if bit == "1":
            gain, power = lr * eye + shrink @ gain, shrink @ power
    weight = share[..., None, None]
    return eye - (weight * (gain @ curvature)).sum(-3), (weight * (gain @ means.cross)).sum(-3)


def losses_by_warmup(world: Federation, trace: Trace, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """The final loss of each warm-up, the profile of each kernel, (warm-up, run), and the largest sharpness, (run,)."""
    final, profiles, sharp = [], [], []
    for warmup in range(setting.rounds + 1):
        means = moments(world.data, trace.kernel_at(warmup), IDENTITY)
        matrix, constant = maps(means, world.data.weight, setting)
        value = trace.value[warmup]
        for _ in range(setting.rounds - warmup):
            value = matrix @ value + constant
        final.append(loss(means, value, RIDGE))
        profiles.append(profile(means, RIDGE) if bool(means.gram.isfinite().all()) else _safe_profile(means))
        sharp.append(torch.linalg.eigvalsh(means.gram.nan_to_num(1e6).clamp(-1e6, 1e6))[..., -1].amax(-1) + RIDGE)
    return torch.stack(final), torch.stack(profiles), torch.stack(sharp).amax(0) * setting.lr


def _safe_profile(means: Moments) -> Tensor:
    fixed = Moments(*(part.nan_to_num(0.0, 0.0, 0.0) for part in (means.gram, means.cross, means.power)), means.weight)
    return torch.where(means.gram.isfinite().all((-1, -2)).all(-1), profile(fixed, RIDGE), torch.inf)


def worlds(kind: str, level: float, clients: int, keys: Iterable[int]) -> Federation:
    size = Size(clients=clients)
    return stack([draw(Key(key) / clients, level, IDENTITY, size, KINDS[kind]) for key in keys])


def check() -> None:
    """Stop if the steps in C and the doubled maps disagree with the laboratory's own."""
    world = worlds("kernel", 1.0, 3, range(41000, 41004))
    setting = Setting(step_size(world, RATE, IDENTITY), 7, 3, RIDGE)
    ours, theirs = play(world, setting), simulate.warm_up(world, setting, IDENTITY)
    final = losses_by_warmup(world, ours, setting)[0]
    for one, other in (
        (torch.cat(ours.kernel, -1), torch.cat(theirs.kernel, -1)),
        (ours.value, theirs.value),
        (ours.spread, theirs.spread),
        (final, simulate.losses_by_warmup(world, theirs, setting, IDENTITY)),
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    kernel, means = ours.kernel_at(3), products_of(world)
    reference = profile(moments(world.data, kernel, IDENTITY), RIDGE)
    torch.testing.assert_close(pooled_profile(*pool(world, means), *kernel), reference, rtol=1e-9, atol=1e-11)


def default_rule(trace: Trace) -> Tensor:
    defaults = {name: each.default for name, each in signature(fedfrozen).parameters.items()}
    return automatic_warmup(trace, defaults["threshold"], defaults["patience"])


@dataclass(frozen=True)
class Cell:
    """The runs of one cell, by world."""

    kind: str
    level: float
    clients: int
    steps: int
    trace: Trace
    losses: Tensor  # (warm-up, run)
    profiles: Tensor  # (warm-up, run)
    stable: Tensor  # (run,)


def cell(world: Federation, means: Products, kind: str, level: float, clients: int, steps: int) -> Cell:
    setting = Setting(step_size(world, RATE, IDENTITY), steps, ROUNDS, RIDGE)
    trace = play(world, setting, means=means)
    losses, profiles, sharp = losses_by_warmup(world, trace, setting)
    return Cell(kind, level, clients, steps, trace, losses, profiles, losses.isfinite().all(0) & (sharp < 2))


def least(world: Federation, means: Products, cells: Sequence[Cell]) -> Tensor:
    """The least profile found: by Adam from the best kernel of all runs of a world, and from a random one, (run,)."""
    profiles = torch.stack([each.profiles.nan_to_num(torch.inf) for each in cells])  # (cell, warm-up, run)
    best, place = profiles.flatten(0, 1).min(0)
    runs = torch.arange(len(place))
    shape = world.kernel.query.shape
    restart = [
        torch.randn(shape, generator=(Key(1) / "restart" / side).generator(), dtype=torch.float64) / 2
        for side in Kernel._fields
    ]
    found = [torch.cat([each.trace.kernel[side] for each in cells])[place, runs] for side in range(2)]
    pooled = pool(world, means)
    for start in (found, restart):
        live = [side.clone().requires_grad_() for side in start]
        optimizer = torch.optim.Adam(live, lr=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SEARCH)
        for _ in range(SEARCH):
            value = pooled_profile(*pooled, *live)
            optimizer.zero_grad()
            value.sum().backward()
            best = torch.minimum(best, value.detach().nan_to_num(torch.inf))
            optimizer.step()
            schedule.step()
    return best


def pool(world: Federation, means: Products) -> tuple[Tensor, Tensor, Tensor]:
    """E S[i, i'] S[j, k] S[j', k'], E S[j, k] (H'Y)[i, o] and E|Y|^2 over all clients."""
    first, second = torch.triu_indices(4, 4)
    place = torch.empty(4, 4, dtype=torch.long)
    place[first, second] = place[second, first] = torch.arange(len(first))
    weight = world.data.weight[..., None, None]
    matrix = (weight * means.matrix).sum(1).unflatten(-1, (4, 10)).unflatten(1, (4, 10))
    matrix = matrix[:, :, place][..., place]  # (run, i, j, k, i', j', k')
    vector = (weight * means.vector).sum(1).unflatten(-1, (4, 10))[..., place]  # (run, o, i, j, k)
    power = (world.data.targets.square().sum((-1, -2)) * world.data.share).sum(-1)
    return matrix, vector, (world.data.weight * power).sum(-1)


def pooled_profile(matrix: Tensor, vector: Tensor, power: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The profile objective of a kernel, (run,)."""
    kernel = query @ key.transpose(-1, -2)
    half = torch.einsum("rij,rijkabc->rkabc", kernel, matrix)
    gram = torch.einsum("rab,rkabc->rkc", kernel, half)
    cross = torch.einsum("rij,roijk->rko", kernel, vector)
    return power / 2 - (cross * torch.linalg.solve(ridged(gram, RIDGE), cross)).sum((-1, -2)) / 2


FIELDS = (
    "kind", "level", "clients", "steps", "world", "stable", "least", "best_warmup", "auto_warmup", "best", "auto",
    "never", *(f"w{share:g}" for share in SHARES),
)  # fmt: skip


def run_map() -> None:
    check()
    with (HERE / "clients.csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(FIELDS)
        for clients, kind, level in product(CLIENTS, KINDS, LEVELS):
            if clients == 30 and kind not in MANY:
                continue
            world = worlds(kind, level, clients, WORLDS)
            means = products_of(world)
            cells = [cell(world, means, kind, level, clients, steps) for steps in STEPS]
            floor = least(world, means, cells)
            for each in cells:
                auto, best = default_rule(each.trace), each.losses.nan_to_num(torch.inf).argmin(0)
                for place, key in enumerate(WORLDS):
                    column = each.losses[:, place]
                    chosen = [int(best[place]), int(auto[place]), ROUNDS, *(round(s * ROUNDS) for s in SHARES)]
                    found = [f"{float(column[warmup]):.5g}" for warmup in chosen]
                    about = [kind, level, clients, each.steps, key, int(each.stable[place]), f"{floor[place]:.5g}"]
                    rows.writerow([*about, *chosen[:2], *found])
            file.flush()
            print(f"{clients} clients, {kind}, level {level:g}: done", file=sys.stderr, flush=True)


def main() -> None:
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["run"]:
            run_map()
        case ["partial"]:
            run_partial()
        case _:
            raise SystemExit(__doc__)


def run_partial() -> None:
    check()
    with (HERE / "partial.csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        names = ("auto", "never", *(f"w{share:g}" for share in SHARES))
        rows.writerow(["kind", "level", "steps", "world", "stable", "auto_warmup", *names])
        for kind, level, steps in product(KINDS, LEVELS, STEPS):
            keys = WORLDS[:48]
            world = worlds(kind, level, POPULATION, keys)
            setting = Setting(step_size(world, RATE, IDENTITY), steps, ROUNDS, RIDGE)
            cohorts = [
                torch.tensor([(Key(key) / "cohort" / round).sample(range(POPULATION), COHORT) for key in keys])
                for round in range(ROUNDS)
            ]
            trace = play(world, setting, cohorts)
            auto = default_rule(trace)
            choices = [auto, *(torch.full_like(auto, round(share * ROUNDS)) for share in (1.0, *SHARES))]
            tails, stable = zip(*(tail_mean(world, trace, setting, cohorts, each) for each in choices), strict=True)
            fine = torch.stack(stable).all(0)
            for place, key in enumerate(keys):
                found = [f"{float(tail[place]):.5g}" for tail in tails]
                rows.writerow([kind, level, steps, key, int(fine[place]), int(auto[place]), *found])
            file.flush()
            print(f"{kind}, level {level:g}, {steps} steps: done", file=sys.stderr, flush=True)


def tail_mean(
    world: Federation, trace: Trace, setting: Setting, cohorts: Sequence[Tensor], warmup: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean loss after each of the last rounds if the kernel is frozen after `warmup` rounds (run,), and whether
    every step under the frozen kernel is stable, (run,)."""
    runs = torch.arange(len(warmup))
    frozen = Kernel(*(side[warmup, runs] for side in trace.kernel))
    means = moments(world.data, frozen, IDENTITY)
    value, losses = trace.value[warmup, runs], []
    for round in range(setting.rounds):
        part, weight = cohorts[round], world.data.weight.gather(1, cohorts[round])
        cohort = Moments(means.gram[runs[:, None], part], means.cross[runs[:, None], part], means.power, weight)
        matrix, constant = maps(cohort, weight / weight.sum(-1, keepdim=True), setting)
        active = (round >= warmup)[:, None, None]
        value = torch.where(active, matrix @ value + constant, value)
        if round >= setting.rounds - TAIL:
            warm = loss(moments(world.data, trace.kernel_at(round + 1), IDENTITY), trace.value[round + 1], RIDGE)
            losses.append(torch.where(active[:, 0, 0], loss(means, value, RIDGE), warm))
    sharp = torch.linalg.eigvalsh(means.gram.nan_to_num(1e6).clamp(-1e6, 1e6))[..., -1].amax(-1) * setting.lr
    mean = torch.stack(losses).mean(0)
    return mean, mean.isfinite() & (sharp < 2)


if __name__ == "__main__":
    main()
