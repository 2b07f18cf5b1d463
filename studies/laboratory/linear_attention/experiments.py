"""Computations behind the figures. Each function returns plain tensors with the seeds in the last dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature

import torch

from linear_attention.simulate import (
    Setting,
    Trace,
    automatic_warmup,
    losses_by_warmup,
    step_size,
    threshold_by_clients,
    warm_up,
)
from linear_attention.synthetic import Differences, Federation, Size, draw, stack
from linear_attention.theory import Data, Features, Kernel, drift, feature_map, moments, profile
from partita.core.rng import Key
from partita.methods.fedfrozen import fedfrozen

LEVELS = (0.0, 0.5, 1.0, 2.0)
STEPS = (1, 2, 5, 10, 20, 40)
ROUNDS, RATE, RIDGE = 60, 0.15, 0.01
SEARCH = 150  # Adam steps on the profile objective
FIXED = 0.3  # fixed warm-up shown for comparison with the automatic one
DIFFER = Differences(rotation=0.5, value=0.3, kernel=1.0)


@dataclass(frozen=True)
class Batch:
    """A batch of federations, (run, ...), and one run of each that never freezes."""

    federation: Federation
    setting: Setting
    trace: Trace
    features: Features


def run(levels: Sequence[float], seeds: int, steps: int) -> Batch:
    """Simulate all seeds of all heterogeneity levels in one batch.

    The run dimension is ordered by level, then by seed.

    Args:
        levels: Heterogeneity levels.
        seeds: Number of seeds for each level.
        steps: A client's gradient steps per round.
    """
    features = feature_map("identity", Size().rank)
    federation = stack([draw(Key(seed), level, features, differ=DIFFER) for level in levels for seed in range(seeds)])
    setting = Setting(step_size(federation, RATE, features), steps, ROUNDS, RIDGE)
    return Batch(federation, setting, warm_up(federation, setting, features), features)


def profiles(batch: Batch) -> torch.Tensor:
    """Return the profile objective before the first round and after each, (round + 1, run)."""
    kernels = (batch.trace.kernel_at(round) for round in range(batch.setting.rounds + 1))
    return torch.stack([profile(moments(batch.federation.data, kernel, batch.features), RIDGE) for kernel in kernels])


def least_profile(batch: Batch) -> torch.Tensor:
    """Return the smallest profile objective found by Adam, from the run's best kernel and from a random one, (run,)."""
    objective = profiles(batch)
    start = objective.argmin(0)  # (run,)
    runs = torch.arange(len(start))
    best = objective.amin(0)
    for attempt in range(2):
        kernel = Kernel(*(side[start, runs] for side in batch.trace.kernel))
        if attempt:
            draws = (Key(attempt) / "restart" / side for side in Kernel._fields)
            kernel = Kernel(*(_normal(key, side.shape) for key, side in zip(draws, kernel, strict=True)))
        best = torch.minimum(best, _descend(batch.federation.data, kernel, batch.features))
    return best


def _normal(key: Key, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=key.generator(), dtype=torch.float64) / math.sqrt(shape[-2])


def _descend(data: Data, kernel: Kernel, features: Features) -> torch.Tensor:
    """Return the smallest value along the way, (run,). Adam is element-wise, so runs do not affect each other."""
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


def by_level(values: torch.Tensor, levels: Sequence[float]) -> torch.Tensor:
    """Return `values` (..., run) reshaped to (..., level, seed)."""
    return values.unflatten(-1, (len(levels), -1))


def profile_descent(levels: Sequence[float], seeds: int, steps: int = 5) -> torch.Tensor:
    """Return the profile objective minus the smallest value found, (round + 1, level, seed).

    The arguments are those of `run`: levels, number of seeds, and local steps per round.
    """
    batch = run(levels, seeds, steps)
    return by_level(profiles(batch) - least_profile(batch), levels)


@dataclass(frozen=True)
class Choices:
    """Final losses of four choices of the warm-up, each (..., seed)."""

    never: torch.Tensor  # never freeze
    fixed: torch.Tensor  # freeze after a fixed fraction of the rounds
    auto: torch.Tensor  # freeze when the automatic rule does
    best: torch.Tensor  # the best warm-up in hindsight


def choices(batch: Batch) -> tuple[Choices, torch.Tensor, torch.Tensor]:
    """Compare choices of the warm-up.

    Returns:
        The final losses of the four choices, the final losses of every warm-up, (warm-up, run), and the automatic
        warm-up, (run,).
    """
    losses = losses_by_warmup(batch.federation, batch.trace, batch.setting, batch.features)
    defaults = {name: parameter.default for name, parameter in signature(fedfrozen).parameters.items()}
    auto = automatic_warmup(batch.trace, threshold_by_clients(batch.federation.data.weight), defaults["patience"])
    rounds = batch.setting.rounds
    return (
        Choices(losses[-1], losses[round(FIXED * rounds)], losses.gather(0, auto[None])[0], losses.amin(0)),
        losses,
        auto,
    )


def bias_and_drift(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bias and drift, both (round + 1, run).

    Bias is the profile objective F minus its smallest value. Drift is the excess loss of FedAvg's fixed point under
    the same kernel.
    """
    bias = profiles(batch) - least_profile(batch)
    setting = batch.setting
    kernels = (batch.trace.kernel_at(round) for round in range(setting.rounds + 1))
    excess = [
        drift(moments(batch.federation.data, kernel, batch.features), setting.ridge, setting.lr, setting.steps)[1]
        for kernel in kernels
    ]
    return bias, torch.stack(excess)
