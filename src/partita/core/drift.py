"""How far clients pull apart, by tag: measured on the stream of updates in memory that does not grow with the cohort.

For the updates d_i of a round with weights p_i and mean m, over the names of one tag:

    dispersion  sqrt(sum p_i |d_i - m|^2) / |m|     0 where all clients agree
    cosine      sum p_i cos(d_i, m)                 1 where all point one way
    distance    sqrt(sum p_i |d_i|^2)               how far a client moved from the anchor

Where clients send different names, p_i are the weights among those who sent a name, for the cosine among those who sent
any name of the tag.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from partita.core import tree
from partita.core.method import Update
from partita.core.model import Model
from partita.core.tree import Mean, Tensors

_WIDE = torch.float64
_FEW = 2**16  # numbers: smaller tensors are put together, for which copies are small and calls few
Measures = dict[str, dict[str, float]]  # tag -> measure -> value


class Drift:
    def __init__(self, model: Model) -> None:
        self.tags = model.tags
        self.mean = Mean()
        self.units: dict[str, Tensors] = {}  # by tag, the sum of d_i / |d_i|, each with its weight
        self.square: dict[str, float] = {}  # by name, the sum of |d_i|^2, each with its weight
        self.pointed: dict[str, float] = {}  # by tag, the weight of those who moved
        self.known: dict[tuple[str, ...], dict[str, list[str]]] = {}

    def watch(self, updates: Iterable[Update]) -> Iterator[Update]:
        """Hands every update on as it is."""
        for update in updates:
            self._see(update.delta, update.weight)
            yield update

    def _see(self, delta: Mapping[str, Tensor], weight: float) -> None:
        self.mean.add(delta, weight)
        squares = tree.squares(delta)
        for name, square in squares.items():
            self.square[name] = self.square.get(name, 0.0) + weight * square
        for tag, names in self._by_tag(tuple(delta)).items():
            if square := sum(squares[name] for name in names):
                self.pointed[tag] = self.pointed.get(tag, 0.0) + weight
                self._point(self.units.setdefault(tag, {}), {n: delta[n] for n in names}, weight / math.sqrt(square))

    def _point(self, units: Tensors, delta: Tensors, share: float) -> None:
        """For all names in one call, since on a GPU each call costs more than the arithmetic."""
        for name, value in delta.items():
            if name not in units:
                units[name] = torch.zeros_like(tree.wide(value))
        torch._foreach_add_([units[name] for name in delta], list(delta.values()), alpha=share)

    def measures(self) -> Measures:
        mean, groups = self.mean.value, self._by_tag(tuple(self.mean.value))
        dots = [_dot(units, mean) for units in self.units.values()]
        along = dict(zip(self.units, torch.stack(dots).tolist() if dots else [], strict=True))
        squares = tree.squares(mean)
        return {tag: self._measure(tag, names, squares, along.get(tag, 0.0)) for tag, names in sorted(groups.items())}

    def _measure(self, tag: str, names: Sequence[str], squares: Mapping[str, float], along: float) -> dict[str, float]:
        spread = sum(self.square[name] / self.mean.weight[name] for name in names)
        mean = sum(squares[name] for name in names)
        length, pointed = math.sqrt(mean), self.pointed.get(tag)
        return {
            "dispersion": math.sqrt(max(0.0, spread - mean)) / length if length else 0.0,
            "cosine": along / pointed / length if pointed and length else 0.0,
            "distance": math.sqrt(spread),
        }

    def _by_tag(self, names: tuple[str, ...]) -> dict[str, list[str]]:
        if names not in self.known:
            self.known[names] = {}
            for name in names:
                for tag in sorted(self.tags[name]):
                    self.known[names].setdefault(tag, []).append(name)
        return self.known[names]


def _dot(left: Tensors, right: Tensors) -> Tensor:
    """Over all names of the left. A client that sent some of a tag's names points nowhere along the others."""
    few = [name for name in left if left[name].numel() < _FEW]
    groups = [few] * bool(few) + [[name] for name in left if left[name].numel() >= _FEW]
    flat = (
        [torch.cat([part[name].flatten() for name in names]).to(_WIDE) for part in (left, right)] for names in groups
    )
    return torch.stack([torch.dot(*both) for both in flat]).sum()
