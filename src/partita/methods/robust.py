"""Robust aggregation: coordinate median, trimmed mean, Krum and geometric median in place of the weighted mean.

A mean follows one bad update anywhere. These rules hold as long as fewer than half of the clients that sent a name are
bad; each card says how far. They replace the server rule only, so they compose with any plan and client rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import torch

from partita.core.method import Method
from partita.core.options import Count, Positive, Range
from partita.core.server_rule import Server, ServerRule
from partita.core.tensors import Tensors, upcast
from partita.core.update import Aggregate, Update

# (updates (client, element), weights (client,)) -> (element,)
Combine: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"
Minority = Annotated[float, Range(low=0, below=0.5)]


@dataclass(frozen=True)
class RobustServer(ServerRule):
    """Combines the vectors of a round with `combine`.

    Names that the same clients sent form one vector, so if all clients send the same names, there is one vector per
    client. Deltas and slots are combined separately. All updates of a round are held in memory.
    """

    combine: Combine

    def reduce(self, server: Server, updates: Iterable[Update], population: int) -> Aggregate:
        received = sorted(updates, key=lambda update: update.client)  # the order of arrival must not matter
        weights = [update.weight for update in received]
        slots = sorted({slot for update in received for slot in update.slots})
        return Aggregate(
            self._combined([update.delta for update in received], weights),
            {slot: self._combined([update.slots.get(slot, {}) for update in received], weights) for slot in slots},
            len(received),
        )

    def _combined(self, parts: Sequence[Mapping[str, torch.Tensor]], weights: Sequence[float]) -> Tensors:
        result: Tensors = {}
        for senders, names in _groups(parts).items():
            values = [[parts[sender][name] for name in names] for sender in senders]
            table = torch.stack([torch.cat([upcast(value).flatten() for value in row]) for row in values])
            shares = torch.tensor([weights[sender] for sender in senders], dtype=torch.float64, device=table.device)
            pieces = torch.split(self.combine(table, shares), [value.numel() for value in values[0]])
            for name, piece, like in zip(names, pieces, values[0], strict=True):
                result[name] = piece.reshape(like.shape).to(like.dtype)
        return {name: result[name] for name in sorted(result)}


def _groups(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[tuple[int, ...], list[str]]:
    """Group the names by the clients that sent them."""
    senders: dict[str, list[int]] = {}
    for place, part in enumerate(parts):
        for name in part:
            senders.setdefault(name, []).append(place)
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(senders):
        groups.setdefault(tuple(senders[name]), []).append(name)
    return groups


def coordinate_median(table: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the median of each element; of two middle values, their mean."""
    ordered = table.sort(0).values
    return torch.lerp(ordered[(len(table) - 1) // 2], ordered[len(table) // 2], 0.5)


def mean_without_extremes(table: torch.Tensor, cut: int) -> torch.Tensor:
    """Return the mean of each element without its `cut` smallest and `cut` largest values."""
    return table.sort(0).values[cut : len(table) - cut].mean(0)


def krum_order(table: torch.Tensor, attackers: int) -> torch.Tensor:
    """Return the clients by Krum's score: the sum of squared distances to the nearest n - attackers - 2 others."""
    wide = table.double()
    distances = torch.cdist(wide, wide, compute_mode="donot_use_mm_for_euclid_dist").square()
    nearest = distances.sort(1).values[:, 1 : 1 + max(1, len(table) - attackers - 2)]
    return nearest.sum(1).argsort(stable=True)


def weighted_geometric_median(
    table: torch.Tensor, weights: torch.Tensor, iterations: int, smoothing: float
) -> torch.Tensor:
    """Return the point with the smallest weighted sum of distances, by Weiszfeld's iteration from the median."""
    wide = table.double()
    point = coordinate_median(wide, weights)
    for _ in range(iterations):
        pull = weights / (wide - point).norm(dim=1).clamp(min=smoothing)
        point = pull @ wide / pull.sum()
    return point.to(table.dtype)


def median() -> Method:
    """Build the coordinate-wise median of the updates."""
    return Method("median", server_rule=RobustServer(coordinate_median))


def trimmed_mean(trim: Minority = 0.2) -> Method:
    """Build the coordinate-wise trimmed mean.

    Args:
        trim: Fraction of the clients to leave out at each end, for every element.
    """

    def combine(table: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return mean_without_extremes(table, int(trim * len(table)))

    return Method("trimmed-mean", server_rule=RobustServer(combine))


def krum(attackers: Minority = 0.2, keep: Count = 1) -> Method:
    """Build Krum, or multi-Krum with `keep` above 1.

    Args:
        attackers: Fraction of the clients that may be bad.
        keep: Number of updates to average, those with the best scores.
    """

    def combine(table: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        best = krum_order(table, int(attackers * len(table)))[:keep]
        return table[best.sort().values].mean(0)

    return Method("krum", server_rule=RobustServer(combine))


def geometric_median(iterations: Count = 10, smoothing: Positive = 1e-6) -> Method:
    """Build RFA: the geometric median of the updates, weighted by the number of examples.

    Args:
        iterations: Weiszfeld iterations.
        smoothing: Smallest distance to divide by.
    """

    def combine(table: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return weighted_geometric_median(table, weights, iterations, smoothing)

    return Method("geometric-median", server_rule=RobustServer(combine))
