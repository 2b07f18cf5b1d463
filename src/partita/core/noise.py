"""Gaussian noise for privacy: keyed, in float64, and rounded so that its last bits reveal nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from partita.core import chacha
from partita.core.cuda_kernels import MAX_THREADS, THREAD, launch
from partita.core.rng import Key
from partita.core.tensors import Tensors

# `add_noise` in one pass, in the same float64 arithmetic: the grid is a power of two.
_ADD_ONCE = (
    THREAD
    + r"""
extern "C" __global__ void add_noise_once(
    const float* value, double* noise, float* noisy, int exponent, int count
) {
    THREAD(count)
    double grid = ldexp(1.0, exponent);
    noisy[thread] = (float)(rint(((double)value[thread] + noise[thread]) / grid) * grid);
    noise[thread] = nan("");
}
"""
)
GRID_BITS = 10  # bits of a noisy sum that are kept below the standard deviation of its noise


def gaussian_noise(like: Tensors, key: Key, std: float) -> Tensors:
    """Return float64 noise with the names, shapes and device of `like`.

    Args:
        like: Tensors whose names, shapes and device the noise takes.
        key: The random key. Use it for one draw only.
        std: The standard deviation.
    """
    return {name: value[0] for name, value in block_noise(like, [key], std).items()}


def block_noise(like: Tensors, keys: Sequence[Key], std: float) -> Tensors:
    """Return float64 noise for several clients, (client, ...).

    Each client and name has its own key, so a block of clients draws the same noise as single clients.

    Args:
        like: Tensors of one client, whose names, shapes and device the noise takes.
        keys: The random key of each client. Use it for one draw only.
        std: The standard deviation.
    """
    digests = [(key / name).digest(chacha.KEY_BYTES) for name in like for key in keys]
    counts = [value.numel() for value in like.values() for _ in keys]
    device = next((value.device for value in like.values()), None)
    drawn = chacha.normal(digests, counts, device, std)
    parts = torch.split(drawn, [len(keys) * value.numel() for value in like.values()])
    return {name: part.view(len(keys), *like[name].shape) for name, part in zip(like, parts, strict=True)}


def add_noise(value: torch.Tensor, noise: torch.Tensor, std: float) -> torch.Tensor:
    """Return `value + noise`, rounded to a grid of about std / 1024, in the type of `value`.

    The last bits of a floating-point sum reveal which value the noise was added to (Mironov 2012). The sum is computed
    in float64 and the grid is 2**42 times coarser than its precision, so every grid point can be reached from every
    value. Rounding is post-processing, so it costs no privacy; it adds less than 1e-7 of the noise's variance.
    """
    grid = 2.0 ** _grid_exponent(std)
    return ((value.double() + noise) / grid).round_().mul_(grid).to(value.dtype)


def add_noise_once(value: torch.Tensor, noise: torch.Tensor, std: float) -> torch.Tensor:
    """Return `add_noise(value, noise, std)`, and overwrite the noise with NaN.

    Args:
        value: The value.
        noise: Contiguous float64 noise of the same shape.
        std: The standard deviation.
    """
    if value.is_cuda and value.dtype == torch.float32 and value.numel() <= MAX_THREADS:
        value = value.contiguous()
        noisy = torch.empty_like(value)
        launch(_ADD_ONCE, "add_noise_once", value.numel(), value, noise, noisy, _grid_exponent(std))
        return noisy
    noisy = add_noise(value, noise, std)
    noise.fill_(math.nan)
    return noisy


def _grid_exponent(std: float) -> int:
    return math.floor(math.log2(std)) - GRID_BITS
