"""Example-level privacy, as DP-SGD has it: each example's gradient is clipped, and noise is added to their sum."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from partita.core import chacha
from partita.core.rng import Key
from partita.core.tree import Tensors

# (parameters, inputs and targets of a batch of one) -> (what is differentiated, the task's loss)
Loss = Callable[[Tensors, Tensors, Tensor], tuple[Tensor, Tensor]]
GRID_BITS = 10  # of a noisy sum below the standard deviation of its noise


class PrivacyError(ValueError):
    """A setting under which a promise of privacy could not be kept."""


@dataclass(frozen=True)
class Private:
    """`noise` is the deviation of the Gaussian in multiples of `clip`, the most that one example adds to a sum.

    Poisson sampling takes every example by itself, which accountants reward; shuffled batches are for comparisons.
    """

    clip: float
    noise: float
    sampling: Literal["poisson", "shuffle"] = "poisson"
    norms: Literal["auto", "direct", "ghost"] = "auto"  # direct: of each example's gradient; ghost: read off layers
    chunk: int | None = None  # examples whose gradients are held at once; None: a whole batch

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise PrivacyError(f"privacy.clip is {self.clip}; it must be above 0")
        if not 0 <= self.noise < float("inf"):
            raise PrivacyError(f"privacy.noise is {self.noise}; it must be a number from 0 up")
        if self.noise and self.clip == float("inf"):
            raise PrivacyError("privacy.clip is infinite, so no noise is enough; give it a number, such as 1.0")
        if self.chunk is not None and self.chunk < 1:
            raise PrivacyError(f"privacy.chunk is {self.chunk}; it must be at least 1, or left out")


@dataclass(frozen=True)
class Draw:
    """Where one client's noise comes from, and the batch size that it expects, by which a sum becomes a mean."""

    key: Key
    batch: int


def clipped_sum(
    loss: Loss, live: Tensors, inputs: Tensors, targets: Tensor, mask: Tensor | None, private: Private
) -> tuple[Tensors, Tensor]:
    """The sum over examples of gradients that are at most `clip` long over all names together, and each one's loss."""
    total: Tensors = {}
    losses: list[Tensor] = []
    size = private.chunk or len(targets)
    for start in range(0, len(targets), size):
        here = slice(start, start + size)
        slopes, norms, found = by_example(loss, live, {k: value[here] for k, value in inputs.items()}, targets[here])
        # One that is no number is left out: it must not tell of its example by breaking the sum.
        out = ~torch.isfinite(norms) if mask is None else ~torch.isfinite(norms) | (mask[here] == 0)
        shares = (private.clip / norms).clamp(max=1.0).masked_fill(out, 0.0)
        for name, slope in slopes.items():
            whole = slope.flatten(1).masked_fill(out.unsqueeze(1), 0.0)  # (example, number)
            part = (shares.to(whole) @ whole).view(slope.shape[1:])
            total[name] = total[name] + part if name in total else part
        losses.append(found)
    return total, torch.cat(losses)


def by_example(loss: Loss, live: Tensors, inputs: Tensors, targets: Tensor) -> tuple[Tensors, Tensor, Tensor]:
    """Each example's gradient, (example, ...) by name, with its norm over all names, and its loss."""

    def one(live: Tensors, inputs: Tensors, target: Tensor) -> tuple[Tensor, Tensor]:
        return loss(live, {name: value.unsqueeze(0) for name, value in inputs.items()}, target.unsqueeze(0))

    slopes, losses = torch.vmap(torch.func.grad(one, has_aux=True), in_dims=(None, 0, 0))(live, inputs, targets)
    squares = [slope.flatten(1).square().sum(1) for slope in slopes.values()]
    return slopes, torch.stack(squares).sum(0).sqrt(), losses


def gaussian(like: Tensors, key: Key, std: float) -> Tensors:
    """Float64 noise for tensors like these, on their device. Keyed by name, so that blocks draw what singles draw."""
    keys = [(key / name).digest(chacha.KEY_BYTES) for name in like]
    device = next((value.device for value in like.values()), None)
    drawn = chacha.normal(keys, [value.numel() for value in like.values()], device)
    return {name: (std * part).view(like[name].shape) for name, part in zip(like, drawn, strict=True)}


def add_noise(value: Tensor, noise: Tensor, std: float) -> Tensor:
    """Their sum, rounded to a grid of about std / 1024, in the type of `value`.

    The last bits of a floating-point sum tell which values its noise was added to (Mironov 2012). The sum is taken in
    float64 and the grid is 2**42 times coarser than its precision, so every grid point can be reached from every value.
    Rounding comes after the noise, so it costs no privacy; it adds a variance of less than 1e-7 of the noise's own.
    """
    grid = 2.0 ** (math.floor(math.log2(std)) - GRID_BITS)
    return ((value.double() + noise) / grid).round_().mul_(grid).to(value.dtype)
