"""Closed forms for linear attention Z(H) = φ(H Q) φ(H K)ᵀ H with output Z W, squared loss and ridge, in float64.

For clients with weights p_i and the means G_i = E ZᵀZ, b_i = E ZᵀY over their examples:

    L(Q, K, W) = ½ Σ p_i E|Y - Z W|² + ½ ridge |W|²      W* = (G + ridge I)⁻¹ b  with  G = Σ p_i G_i, b = Σ p_i b_i
    F(Q, K) = min over W of L = ½ Σ p_i E|Y|² - ½ tr bᵀ W*     the profile objective, which depends only on the kernel
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from partita.core.rng import Key

Features = Callable[[torch.Tensor], torch.Tensor]  # the map φ over the last dimension


class LabError(ValueError):
    """Invalid laboratory setting."""


class Kernel(NamedTuple):
    """Query and key weights, which define the attention kernel."""

    query: torch.Tensor  # (..., width, rank)
    key: torch.Tensor  # (..., width, rank)

    def spread(self) -> Kernel:
        """Add a client dimension that broadcasts, (..., 1, width, rank)."""
        return Kernel(self.query.unsqueeze(-3), self.key.unsqueeze(-3))


@dataclass(frozen=True)
class Data:
    """The clients of one federation or of a batch. Padding examples have a share of zero."""

    inputs: torch.Tensor  # (..., client, example, token, width)
    targets: torch.Tensor  # (..., client, example, token, output)
    share: torch.Tensor  # (..., client, example), sums to one over a client's examples
    weight: torch.Tensor  # (..., client), sums to one


@dataclass(frozen=True)
class Moments:
    """Sufficient statistics of the data for the value weights, given a fixed kernel."""

    gram: torch.Tensor  # (..., client, width, width), E ZᵀZ
    cross: torch.Tensor  # (..., client, width, output), E ZᵀY
    power: torch.Tensor  # (..., client), E|Y|²
    weight: torch.Tensor  # (..., client)

    def pooled(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return G, b and E|Y|² over all clients."""
        weight = self.weight
        return (
            (weight[..., None, None] * self.gram).sum(-3),
            (weight[..., None, None] * self.cross).sum(-3),
            (weight * self.power).sum(-1),
        )


def feature_map(name: str, rank: int, key: Key = Key(0), count: int = 8) -> Features:  # noqa: B008
    """Return a feature map by name.

    Args:
        name: "identity", "relu", "elu" (elu(x) + 1), or "random": positive random features whose inner product has the
            mean exp(q·k).
        rank: Input size of the random features.
        key: Key of the random features.
        count: Number of random features.

    Raises:
        LabError: If there is no feature map of this name.
    """
    if name == "random":
        directions = torch.randn(rank, count, generator=(key / "features").generator(), dtype=torch.float64)
        return lambda x: torch.exp(x @ directions - x.square().sum(-1, keepdim=True) / 2) / math.sqrt(count)
    if name not in FEATURES:
        raise LabError(f"unknown feature map '{name}'; it can be: {', '.join(sorted([*FEATURES, 'random']))}")
    return FEATURES[name]


FEATURES: dict[str, Features] = {
    "identity": lambda x: x,
    "elu": lambda x: (functional.elu(x) + 1) / math.sqrt(x.shape[-1]),  # so that an inner product is about one
    "relu": functional.relu,
}


def attend(inputs: torch.Tensor, kernel: Kernel, features: Features) -> torch.Tensor:
    """Return Z, (..., example, token, width). The kernel has the leading dimensions of the inputs before `example`."""
    flat = inputs.flatten(-3, -2)  # one matrix product for all examples of a client
    queries, keys = (
        features(flat @ side).unflatten(-2, inputs.shape[-3:-1])  # (..., example, token, feature)
        for side in kernel
    )
    return queries @ (keys.transpose(-1, -2) @ inputs)


def moments(data: Data, kernel: Kernel, features: Features) -> Moments:
    """Compute the moments under a kernel that all clients share."""
    mixed = attend(data.inputs, kernel.spread(), features)
    rows = (mixed * data.share[..., None, None]).flatten(-3, -2).transpose(-1, -2)  # (..., client, width, row)
    return Moments(
        gram=rows @ mixed.flatten(-3, -2),
        cross=rows @ data.targets.flatten(-3, -2),
        power=(data.targets.square().sum((-1, -2)) * data.share).sum(-1),
        weight=data.weight,
    )


def loss(means: Moments, value: torch.Tensor, ridge: float) -> torch.Tensor:
    """Return the loss L, (...), of value weights (..., width, output), from moments `means` and the penalty `ridge`."""
    gram, cross, power = means.pooled()
    return power / 2 - (cross * value).sum((-1, -2)) + (value * (ridged(gram, ridge) @ value)).sum((-1, -2)) / 2


def best_value(means: Moments, ridge: float) -> torch.Tensor:
    """Return W*, the optimal value weights (..., width, output), from the moments `means` and the penalty `ridge`."""
    gram, cross, _ = means.pooled()
    return torch.linalg.solve(ridged(gram, ridge), cross)


def profile(means: Moments, ridge: float) -> torch.Tensor:
    """Return F, the loss (...) with optimal value weights, from the moments `means` and the penalty `ridge`."""
    _, cross, power = means.pooled()
    return power / 2 - (cross * best_value(means, ridge)).sum((-1, -2)) / 2


def profile_gradient(data: Data, kernel: Kernel, ridge: float, features: Features) -> Kernel:
    """Return the gradient of F: by the envelope theorem, that of L in the kernel with the value weights fixed at W*."""
    live = Kernel(*(side.detach().requires_grad_() for side in kernel))
    means = moments(data, live, features)
    held = best_value(means, ridge).detach()
    return Kernel(*torch.autograd.grad(loss(means, held, ridge).sum(), live))


def round_map(means: Moments, ridge: float, lr: float | torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (M, c) of a frozen round W -> M W + c: FedAvg with `steps` gradient steps on each client.

    A client ends at (I - B_i C_i) W + B_i b_i, with C_i = G_i + ridge I and B_i = lr Σ (I - lr C_i)ᵏ over k < steps.

    Args:
        means: Moments of the data under the kernel.
        ridge: Ridge penalty.
        lr: Learning rate, one for all runs or (run,).
        steps: A client's gradient steps per round.

    Returns:
        M, (..., width, width), and c, (..., width, output).
    """
    curvature = ridged(means.gram, ridge)  # (..., client, width, width)
    if isinstance(lr, torch.Tensor):
        lr = lr[..., None, None, None]
    eye = torch.eye(curvature.shape[-1], dtype=curvature.dtype)
    gain = torch.zeros_like(curvature)
    for _ in range(steps):  # Horner's scheme for B_i; also valid if C_i is singular
        gain = lr * eye + gain - lr * curvature @ gain
    weight = means.weight[..., None, None]
    return eye - (weight * (gain @ curvature)).sum(-3), (weight * (gain @ means.cross)).sum(-3)


def fixed_point(means: Moments, ridge: float, lr: float | torch.Tensor, steps: int) -> torch.Tensor:
    """Return the limit W = M W + c of frozen rounds, a mean of the clients' optima that favors the steepest client.

    The arguments `ridge`, `lr` and `steps` are those of `round_map`. The limit has the shape (..., width, output).
    """
    matrix, constant = round_map(means, ridge, lr, steps)
    return torch.linalg.solve(torch.eye(matrix.shape[-1], dtype=matrix.dtype) - matrix, constant)


def drift(means: Moments, ridge: float, lr: float | torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (distance to W*, excess loss) of the fixed point, each (...).

    The arguments `means`, `ridge`, `lr` and `steps` are those of `round_map`.
    """
    gram, _, _ = means.pooled()
    gap = fixed_point(means, ridge, lr, steps) - best_value(means, ridge)
    return torch.linalg.matrix_norm(gap), (gap * (ridged(gram, ridge) @ gap)).sum((-1, -2)) / 2


def ridged(gram: torch.Tensor, ridge: float) -> torch.Tensor:
    """Return G + ridge I for a `gram` matrix G, (..., width, width)."""
    return gram + ridge * torch.eye(gram.shape[-1], dtype=gram.dtype)
