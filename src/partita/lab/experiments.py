"""The numbers behind the figures: each function returns plain tensors, with the seeds in the last dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature

import torch
from torch import Tensor

from partita.core.rng import Key
from partita.lab.simulate import Setting, Trace, automatic_warmup, losses_by_warmup, step_size, warm_up
from partita.lab.synthetic import Differences, Federation, Size, draw, stack
from partita.lab.theory import Data, Features, Kernel, drift, feature_map, moments, profile
from partita.methods.fedfrozen import fedfrozen

LEVELS = (0.0, 0.5, 1.0, 2.0)
STEPS = (1, 2, 5, 10, 20, 40)
ROUNDS, RATE, RIDGE = 60, 0.15, 0.01
SEARCH = 150  # steps of Adam on the profile objective
FIXED = 0.3  # the fixed warm-up that the automatic one is shown beside
DIFFER = Differences(rotation=0.5, value=0.3, kernel=1.0)


@dataclass(frozen=True)
class Batch:
    """Federations side by side (run), and one run of each that never freezes."""

    world: Federation
    setting: Setting
    trace: Trace
    features: Features


def run(levels: Sequence[float], seeds: int, steps: int) -> Batch:
    """(run,) goes through the levels, and within each through the seeds."""
    features = feature_map("identity", Size().rank)
    world = stack([draw(Key(seed), level, features, differ=DIFFER) for level in levels for seed in range(seeds)])
    setting = Setting(step_size(world, RATE, features), steps, ROUNDS, RIDGE)
    return Batch(world, setting, warm_up(world, setting, features), features)


def profiles(batch: Batch) -> Tensor:
    """(round + 1, run): the profile objective before the first round and after each."""
    kernels = (batch.trace.kernel_at(round) for round in range(batch.setting.rounds + 1))
    return torch.stack([profile(moments(batch.world.data, kernel, batch.features), RIDGE) for kernel in kernels])


def least_profile(batch: Batch) -> Tensor:
    """(run,): the smallest profile objective found, by Adam from the run's best kernel and from a random one."""
    found = profiles(batch)
    start = found.argmin(0)  # (run,)
    runs = torch.arange(len(start))
    best = found.amin(0)
    for attempt in range(2):
        kernel = Kernel(*(side[start, runs] for side in batch.trace.kernel))
        if attempt:
            draws = (Key(attempt) / "restart" / side for side in Kernel._fields)
            kernel = Kernel(*(_normal(key, side.shape) for key, side in zip(draws, kernel, strict=True)))
        best = torch.minimum(best, _descend(batch.world.data, kernel, batch.features))
    return best


def _normal(key: Key, shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=key.generator(), dtype=torch.float64) / math.sqrt(shape[-2])


def _descend(data: Data, kernel: Kernel, features: Features) -> Tensor:
    """(run,): the smallest value on the way; Adam is element-wise, so runs do not disturb each other."""
    live = [side.clone().requires_grad_() for side in kernel]
    optimizer = torch.optim.Adam(live, lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SEARCH)
    best = torch.full(kernel.query.shape[:1], torch.inf, dtype=torch.float64)
    for _ in range(SEARCH):
        optimizer.zero_grad()
        value = profile(moments(data, Kernel(*live), features), RIDGE)
        value.sum().backward()
        best = torch.minimum(best, value.detach())
        optimizer.step()
        schedule.step()
    return best


def by_level(values: Tensor, levels: Sequence[float]) -> Tensor:
    """(..., level, seed) from (..., run)."""
    return values.unflatten(-1, (len(levels), -1))


def profile_descent(levels: Sequence[float], seeds: int, steps: int = 5) -> Tensor:
    """(round + 1, level, seed): how far the kernel's objective is above the smallest found."""
    batch = run(levels, seeds, steps)
    return by_level(profiles(batch) - least_profile(batch), levels)


@dataclass(frozen=True)
class Choices:
    """Final losses of four ways to choose the warm-up, each (..., seed)."""

    never: Tensor
    fixed: Tensor
    auto: Tensor
    best: Tensor


def choices(batch: Batch) -> tuple[Choices, Tensor, Tensor]:
    """(the losses, (warm-up, run) of every warm-up, (run,) the automatic warm-up)."""
    losses = losses_by_warmup(batch.world, batch.trace, batch.setting, batch.features)
    defaults = {name: each.default for name, each in signature(fedfrozen).parameters.items()}
    auto = automatic_warmup(batch.trace, defaults["threshold"], defaults["patience"])
    rounds = batch.setting.rounds
    return (
        Choices(losses[-1], losses[round(FIXED * rounds)], losses.gather(0, auto[None])[0], losses.amin(0)),
        losses,
        auto,
    )


def bias_and_drift(batch: Batch) -> tuple[Tensor, Tensor]:
    """Both (round + 1, run): F above its least, and what FedAvg's fixed point under that kernel adds."""
    bias = profiles(batch) - least_profile(batch)
    setting = batch.setting
    kernels = (batch.trace.kernel_at(round) for round in range(setting.rounds + 1))
    excess = [
        drift(moments(batch.world.data, kernel, batch.features), setting.ridge, setting.lr, setting.steps)[1]
        for kernel in kernels
    ]
    return bias, torch.stack(excess)
