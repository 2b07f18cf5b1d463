"""Synthetic federations: clients that share a task and differ by a heterogeneity level, drawn from a key."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from linear_attention.theory import Data, Features, Kernel, LabError, attend
from partita.core.rng import Key


@dataclass(frozen=True)
class Size:
    """Size of a federation."""

    clients: int = 8
    examples: int = 12  # of a median client
    tokens: int = 6  # tokens per example
    width: int = 4  # width of a token
    rank: int = 2  # rank of the query and key weights
    outputs: int = 2  # outputs per token


@dataclass(frozen=True)
class Differences:
    """Scales of the differences between clients at level 1. Each is multiplied by the level."""

    rotation: float = 1.0  # rotation of the client's inputs
    value: float = 0.5  # value weights that generate its targets
    kernel: float = 0.5  # kernel that generates its targets
    noise: float = 0.5  # log of the factor on its label noise
    sizes: float = 0.5  # log of its number of examples


@dataclass(frozen=True)
class Federation:
    """The clients' data and the server's initial weights."""

    data: Data
    kernel: Kernel
    value: torch.Tensor  # (..., width, output)


def draw(
    key: Key,
    level: float,
    features: Features,
    size: Size = Size(),  # noqa: B008
    differ: Differences = Differences(),  # noqa: B008
    noise: float = 0.1,
) -> Federation:
    """Draw a federation. Targets come from linear attention plus noise.

    Args:
        key: Key of all draws.
        level: Heterogeneity. At 0, clients differ only by sampling.
        features: Feature map of the attention.
        size: Size of the federation.
        differ: Differences between clients at level 1.
        noise: Label noise.

    Raises:
        LabError: If the level is negative, or if there are no clients or no examples.
    """
    if level < 0 or size.clients < 1 or size.examples < 1:
        raise LabError(
            f"level {level} with {size.clients} clients of {size.examples} examples; give a level of 0 or more, and at "
            "least 1 client and 1 example"
        )

    def normal(name: str, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=(key / name).generator(), dtype=torch.float64)

    clients, examples, width = size.clients, size.examples, size.width
    counts = _sizes(level * differ.sizes * normal("sizes", clients), examples)
    most = int(counts.max())
    present = (torch.arange(most) < counts[:, None]).double()  # (client, example)

    generator_matrix = normal("rotation", clients, width, width) / math.sqrt(width)
    rotation = torch.linalg.matrix_exp(
        level * differ.rotation * (generator_matrix - generator_matrix.transpose(-1, -2))
    )
    # Anisotropic inputs, because a rotation would not change isotropic ones. Tokens have equal norm, as after a norm
    # layer.
    tokens = normal("inputs", clients, most, size.tokens, width) * torch.linspace(1.5, 0.5, width, dtype=torch.float64)
    tokens = functional.normalize(tokens, dim=-1) * math.sqrt(width / size.tokens)  # so that tr HᵀH = width
    inputs = tokens @ rotation.unsqueeze(1)

    own = level * differ.kernel
    teacher = Kernel(*(_matrix(normal, side, width, size.rank, clients, own) for side in Kernel._fields))
    value = _matrix(normal, "value", width, size.outputs, clients, level * differ.value)
    targets = attend(inputs, teacher, features) @ value.unsqueeze(-3)
    # Normalize over all clients together, so that losses at different levels are comparable.
    targets = targets / (targets.square() * present[..., None, None]).sum().div(present.sum()).sqrt()
    noise_factor = torch.exp(level * differ.noise * normal("noise.client", clients))[:, None, None, None]
    targets = targets + noise * noise_factor * normal("noise", *targets.shape) / math.sqrt(size.tokens * size.outputs)

    data = Data(inputs, targets, present / counts[:, None], counts / counts.sum())
    start = Kernel(*(normal(f"start.{side}", width, size.rank) / math.sqrt(width) for side in Kernel._fields))
    return Federation(data, start, torch.zeros(width, size.outputs, dtype=torch.float64))


def _sizes(logarithms: torch.Tensor, middle: int) -> torch.Tensor:
    """Limit sizes to between half and twice the median, because all clients are padded to the largest."""
    return (middle * torch.exp(logarithms).clamp(0.5, 2.0)).round().clamp(min=1)


def _matrix(
    normal: Callable[..., torch.Tensor], name: str, rows: int, columns: int, clients: int, own: float
) -> torch.Tensor:
    """Return a common matrix plus each client's own difference, (client, rows, columns)."""
    common, private = normal(name, rows, columns), normal(f"{name}.client", clients, rows, columns)
    return (common + own * private) / math.sqrt(rows)


def stack(federations: Sequence[Federation]) -> Federation:
    """Stack federations to (run, ...). Clients with fewer examples are padded with examples of share zero."""
    most = max(federation.data.share.shape[-1] for federation in federations)

    def pad(value: torch.Tensor, axis: int) -> torch.Tensor:
        missing = most - value.shape[axis]
        filler = value.new_zeros([missing if place == axis else length for place, length in enumerate(value.shape)])
        return torch.cat([value, filler], axis)

    data = [federation.data for federation in federations]
    return Federation(
        Data(
            torch.stack([pad(part.inputs, 1) for part in data]),
            torch.stack([pad(part.targets, 1) for part in data]),
            torch.stack([pad(part.share, 1) for part in data]),
            torch.stack([part.weight for part in data]),
        ),
        Kernel(*(torch.stack(sides) for sides in zip(*(federation.kernel for federation in federations), strict=True))),
        torch.stack([federation.value for federation in federations]),
    )
