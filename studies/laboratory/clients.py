"""Where freezing the kernel helps: the number of clients in the mean, the local steps, and how clients differ.

    python studies/laboratory/clients.py run            every cell of the map that clients.csv does not have
    python studies/laboratory/clients.py partial        3 of 20 clients a round; writes partial.csv
    python studies/laboratory/clients.py table          the tables, from these files
    python studies/laboratory/clients.py plot           the map, clients.png
    python studies/laboratory/clients.py again 3 kernel 3   play one cell of the map again: clients, kind, level
    python studies/laboratory/clients.py rules          thresholds of the automatic rule on the development worlds
    python studies/laboratory/clients.py rules --test   the old and the chosen one on the test worlds

Many local steps are affordable because the steps are C (steps.c, compiled with cc on the first use): with the identity
map a client's loss is a quadratic function of B[i, jk, o] = A[i, j] W[k, o] + [j != k] A[i, k] W[j, o], j <= k, with
A = Q K'. Its matrix E[S[i, i'] S[jk] S[j'k']] and vector E[S[jk] (H'Y)[i, o]], S = H'H, are computed once. Each start
checks it against `linear_attention.simulate.warm_up`.
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
from linear_attention import simulate
from linear_attention.experiments import SEARCH
from linear_attention.simulate import Setting, Trace, automatic_warmup, step_size
from linear_attention.synthetic import Differences, Federation, Size, draw, stack
from linear_attention.theory import Kernel, Moments, feature_map, loss, moments, profile, ridged
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from partita.core.rng import Key
from partita.methods.fedfrozen import fedfrozen
from partita.report.tables import holm

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
        away = [(own - mean[:, None]).square().sum((-1, -2)) for own, mean in zip(after[:2], path[-1][:2], strict=True)]
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


def default_rule(trace: Trace, threshold: float | Tensor = 17.0) -> Tensor:
    """The automatic rule. The map was played with its earlier threshold, 17 for any number of clients."""
    return automatic_warmup(trace, threshold, signature(fedfrozen).parameters["patience"].default)


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
    """Play the cells that are not in the file yet."""
    check()
    path = HERE / "clients.csv"
    known = path.read_text().splitlines() if path.exists() else []
    played = {(int(row["clients"]), row["kind"], float(row["level"])) for row in csv.DictReader(known)}
    with path.open("a", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        if not known:
            rows.writerow(FIELDS)
        for clients, kind, level in product(CLIENTS, KINDS, LEVELS):
            if (clients, kind, level) in played:
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


def run_partial() -> None:
    check()
    with (HERE / "partial.csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        names = ("auto", "never", *(f"w{share:g}" for share in SHARES))
        rows.writerow(["kind", "level", "steps", "world", "stable", "auto_warmup", *names])
        for kind, level, steps in product(KINDS, LEVELS, (100,)):
            keys = WORLDS[:48]
            world = worlds(kind, level, POPULATION, keys)
            setting = Setting(step_size(world, RATE, IDENTITY), steps, ROUNDS, RIDGE)
            cohorts = [
                torch.tensor([(Key(key) / "cohort" / round).sample(range(POPULATION), COHORT) for key in keys])
                for round in range(ROUNDS)
            ]
            trace = play(world, setting, cohorts)
            auto = default_rule(trace)
            warm = [
                loss(moments(world.data, trace.kernel_at(round + 1), IDENTITY), trace.value[round + 1], RIDGE)
                for round in range(ROUNDS - TAIL, ROUNDS)
            ]
            choices = [auto, *(torch.full_like(auto, round(share * ROUNDS)) for share in (1.0, *SHARES))]
            tails, stable = zip(
                *(tail_mean(world, trace, setting, cohorts, each, warm) for each in choices), strict=True
            )
            fine = torch.stack(stable).all(0)
            for place, key in enumerate(keys):
                found = [f"{float(tail[place]):.5g}" for tail in tails]
                rows.writerow([kind, level, steps, key, int(fine[place]), int(auto[place]), *found])
            file.flush()
            print(f"{kind}, level {level:g}, {steps} steps: done", file=sys.stderr, flush=True)


def tail_mean(
    world: Federation,
    trace: Trace,
    setting: Setting,
    cohorts: Sequence[Tensor],
    warmup: Tensor,
    warm: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """The mean loss after each of the last rounds if the kernel is frozen after `warmup` rounds (run,), and whether
    every step under the frozen kernel is stable, (run,). `warm` has the losses of these rounds without freezing."""
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
            before = warm[round - setting.rounds + TAIL]
            losses.append(torch.where(active[:, 0, 0], loss(means, value, RIDGE), before))
    sharp = torch.linalg.eigvalsh(means.gram.nan_to_num(1e6).clamp(-1e6, 1e6))[..., -1].amax(-1) * setting.lr
    mean = torch.stack(losses).mean(0)
    return mean, mean.isfinite() & (sharp < 2)


@dataclass(frozen=True)
class Effect:
    """A choice of the warm-up against never freezing in one cell, paired over federations; logs are times 100."""

    mean: float  # mean log ratio of the final loss
    low: float  # its 95% interval
    high: float
    p: float
    excess: float  # median of the loss above the least profile, relative to that profile, in percent
    worlds: int


def read(file: str) -> dict[tuple[str, ...], list[dict[str, float]]]:
    """The stable runs by cell: kind, level, clients if they vary, and steps."""
    cells: dict[tuple[str, ...], list[dict[str, float]]] = {}
    for row in csv.DictReader((HERE / file).open()):
        about = tuple(row[name] for name in ("kind", "level", "clients", "steps") if name in row)
        if row["stable"] == "1":
            cells.setdefault(about, []).append({name: float(row[name]) for name in row if name != "kind"})
    return cells


def effect(rows: Sequence[dict[str, float]], name: str) -> Effect:
    got, never = (np.array([row[each] for row in rows]) for each in (name, "never"))
    ratio = 100 * np.log(got / never)
    excess = np.nan
    if "least" in rows[0]:
        least = np.array([row["least"] for row in rows])
        excess = 100 * float(np.median(got / least - 1))
    if not ratio.any():
        return Effect(0.0, 0.0, 0.0, 1.0, excess, len(rows))
    low, high = stats.t.interval(0.95, len(ratio) - 1, ratio.mean(), stats.sem(ratio))
    return Effect(ratio.mean(), low, high, stats.ttest_1samp(ratio, 0).pvalue, excess, len(rows))


CHOICES = (*(f"w{share:g}" for share in SHARES), "auto")


def tables() -> str:
    parts = []
    for file in ("clients.csv", "partial.csv"):
        cells = read(file)
        effects = {(cell, name): effect(rows, name) for cell, rows in cells.items() for name in CHOICES}
        corrected = dict(zip(effects, holm([found.p for found in effects.values()]), strict=True))
        most = " | ".join(name.removeprefix("w") for name in CHOICES)
        number = " clients |" if file == "clients.csv" else ""
        more = " best of all | excess: never, 0.5, best |" if file == "clients.csv" else ""
        lines = [f"| kind | level |{number} steps | {most} |{more}"]
        lines.append("|" + " --: |" * (lines[0].count("|") - 1))
        for cell, rows in cells.items():
            marked = [
                f"{found.mean:+.1f}" + ("\\*" if corrected[cell, name] < 0.05 else "")
                for name in CHOICES
                if (found := effects[cell, name])
            ]
            if file == "clients.csv":
                chosen = effect(rows, "best")
                marked.append(f"{chosen.mean:+.1f}")
                marked.append(", ".join(f"{effect(rows, name).excess:.0f}" for name in ("never", "w0.5", "best")))
            lines.append(f"| {' | '.join((*(_plain(part) for part in cell), *marked))} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def again(clients: int, kind: str, level: float) -> str:
    """Play one cell of the map again, and return a table of the final loss against never freezing."""
    world = worlds(kind, level, clients, WORLDS)
    means = products_of(world)
    names = [name for name in CHOICES if name != "auto"]
    heads = [name.removeprefix("w") for name in names]
    table = [f"| local steps | {' | '.join(heads)} | federations |", "| --: |" + " --: |" * (len(names) + 1)]
    for steps in STEPS:
        each = cell(world, means, kind, level, clients, steps)
        shares = {"never": 1.0, **dict(zip(names, SHARES, strict=True))}
        losses = {name: each.losses[round(share * ROUNDS), each.stable].tolist() for name, share in shares.items()}
        rows = [dict(zip(losses, values, strict=True)) for values in zip(*losses.values(), strict=True)]
        effects = [effect(rows, name) for name in names]
        texts = [f"{found.mean:+.1f} [{found.low:.1f}, {found.high:.1f}]" for found in effects]
        table.append(f"| {steps} | {' | '.join(texts)} | {len(rows)} |")
    return "\n".join(table)


def _plain(text: str) -> str:
    return text.removesuffix(".0")


def plot() -> None:
    from matplotlib import colormaps
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.patches import Rectangle

    from partita.report.plot_style import INK, new_figure

    cells = read("clients.csv")
    numbers = [number for number in CLIENTS if any(cell[2] == str(number) for cell in cells)]
    shown = ("w0.1", "w0.3", "w0.5", "w0.8", "auto")
    titles = {"w0.1": "frozen after 0.1", "w0.3": "after 0.3", "w0.5": "after 0.5", "w0.8": "after 0.8"}
    colors, norm = colormaps["RdBu_r"], TwoSlopeNorm(vmin=-10, vcenter=0, vmax=10)
    figure = new_figure(11.5, 13.5)
    panels = figure.subplots(2 * len(KINDS), len(shown))
    for row, (kind, level) in enumerate(product(KINDS, LEVELS)):
        for column, name in enumerate(shown):
            axes = panels[row][column]
            for (y, steps), (x, number) in product(enumerate(STEPS), enumerate(numbers)):
                found = effect(cells[kind, str(level), str(number), str(steps)], name)
                color = colors(norm(found.mean))
                hatch = "////" if found.low <= 0 <= found.high else None
                axes.add_patch(
                    Rectangle((x, y), 1, 1, facecolor=color, edgecolor="#8a8a8a", hatch=hatch, linewidth=0.4)
                )
                strong = abs(found.mean) > 7
                box = None if strong or not hatch else {"facecolor": color, "edgecolor": "none", "pad": 1.2}
                label = f"{found.mean:+.1f}" if abs(found.mean) < 99.95 else f"{found.mean:+.0f}"
                ink = "white" if strong else INK
                axes.text(x + 0.5, y + 0.5, label, ha="center", va="center", fontsize=7.5, color=ink, bbox=box)
            axes.set_xlim(0, len(numbers))
            axes.set_ylim(0, len(STEPS))
            axes.set_xticks([x + 0.5 for x in range(len(numbers))], [str(number) for number in numbers], fontsize=8)
            axes.set_yticks([y + 0.5 for y in range(len(STEPS))], [str(steps) for steps in STEPS], fontsize=8)
            axes.tick_params(length=0)
            for spine in axes.spines.values():
                spine.set_visible(False)
            if row == 0:
                axes.set_title(titles.get(name, "automatic, threshold 17"), fontsize=10, color=INK)
            if column == 0:
                axes.set_ylabel(f"{kind}, level {level:g}\nlocal steps", fontsize=8.5, color=INK)
            if row == 2 * len(KINDS) - 1:
                axes.set_xlabel("clients", fontsize=8.5, color=INK)
    figure.suptitle(
        "Final loss relative to never freezing, mean log ratio in %: blue is better, red is worse.\n"
        "Hatched: the 95% interval holds zero. 39 to 64 stable federations a cell.",
        fontsize=11,
        color=INK,
    )
    figure.savefig(HERE / "clients.png", dpi=110, facecolor="white")


def thresholds(effective: Tensor) -> dict[str, Tensor]:
    """The thresholds that were compared, (run,), for an effective number of clients (run,)."""
    more = (effective - 1).clamp(min=0)
    found = {f"constant {value}": torch.full_like(effective, value) for value in (17, 14, 12, 10, 8)}
    found |= {f"{factor:g} (n - 1)^(1/2)": factor * more.sqrt() for factor in (8, 7, 6.4)}
    return found | {f"{factor} (n - 1)^(1/4)": factor * more**0.25 for factor in (10, 11, 12)}


def compare_rules(keys: Sequence[int], names: Sequence[str] = ()) -> str:
    """A table of thresholds: mean log ratio to never freezing in %, and the shares worse by 2% and by 10%."""
    check()
    parts: dict[str, dict[str, list[Tensor]]] = {}
    for clients, kind, level in product((2, 3, 5, 12), KINDS, LEVELS):
        world = worlds(kind, level, clients, keys)
        means = products_of(world)
        for steps in (20, 100) if clients < 12 else (100,):
            each = cell(world, means, kind, level, clients, steps)
            group = f"2 and 3 clients, {kind}" if clients < 5 else f"{clients} clients"
            effective = 1 / world.data.weight.square().sum(-1)
            for name, threshold in thresholds(effective).items():
                if names and name not in names:
                    continue
                chosen = default_rule(each.trace, threshold)
                ratio = (each.losses.gather(0, chosen[None])[0] / each.losses[-1])[each.stable]
                for of in (group, "all"):
                    parts.setdefault(name, {}).setdefault(of, []).append(ratio)
    groups = list(next(iter(parts.values())))
    rows = [f"| threshold | {' | '.join(groups)} |", "| :-- |" + " --: |" * len(groups)]
    for name, found in parts.items():
        joined = [torch.cat(found[group]) for group in groups]
        cells = [
            f"{100 * ratio.log().mean():+.2f}, {100 * (ratio > 1.02).double().mean():.1f}, "
            f"{100 * (ratio > 1.1).double().mean():.1f}"
            for ratio in joined
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    torch.set_num_threads(1)
    half = len(WORLDS) // 2
    match sys.argv[1:]:
        case ["run"]:
            run_map()
        case ["partial"]:
            run_partial()
        case ["table"]:
            print(tables())
        case ["plot"]:
            plot()
        case ["again", clients, kind, level] if kind in KINDS:
            print(again(int(clients), kind, float(level)))
        case ["rules"]:
            print(compare_rules(WORLDS[:half]))
        case ["rules", "--test"]:
            print(compare_rules(WORLDS[half:], ("constant 17", "10 (n - 1)^(1/4)")))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
