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
from collections.abc import Iterable, Iterator

import torch

from partita.core import tree
from partita.core.method import Update
from partita.core.model import Model
from partita.core.tree import Mean, Tensors

_WIDE = torch.float64
Measures = dict[str, dict[str, float]]  # tag -> measure -> value


class Drift:
    def __init__(self, model: Model) -> None:
        self.tags = model.tags
        self.mean = Mean()
        self.direction: dict[str, Mean] = {}  # by tag, the mean of d_i / |d_i|
        self.square: dict[str, float] = {}  # by name, the mean of |d_i|^2, summed up with its weight
        self.weight: dict[str, float] = {}
        self.pointed: dict[str, float] = {}  # by tag, the weight of those who moved

    def watch(self, updates: Iterable[Update]) -> Iterator[Update]:
        """Hands every update on as it is."""
        for update in updates:
            self._see(update.delta, update.weight)
            yield update

    def _see(self, delta: Tensors, weight: float) -> None:
        self.mean.add(delta, weight)
        squares = tree.squares(delta)
        for name, square in squares.items():
            self.square[name] = self.square.get(name, 0.0) + weight * square
            self.weight[name] = self.weight.get(name, 0.0) + weight
        for tag, names in self._by_tag(delta).items():
            length = math.sqrt(sum(squares[name] for name in names))
            if length > 0:
                unit = {name: delta[name] / length for name in names}
                self.direction.setdefault(tag, Mean()).add(unit, weight)
                self.pointed[tag] = self.pointed.get(tag, 0.0) + weight

    def measures(self) -> Measures:
        return {tag: self._measure(tag, names) for tag, names in sorted(self._by_tag(self.mean.value).items())}

    def _measure(self, tag: str, names: list[str]) -> dict[str, float]:
        spread = sum(self.square[name] / self.weight[name] for name in names)
        mean = sum(tree.squares(tree.select(self.mean.value, names)).values())
        # A client that sent some of the tag's names points nowhere along the others.
        unit = self.direction[tag].over(self.pointed[tag]) if self.pointed.get(tag) else {}
        along = sum(float((unit[name] * self.mean.value[name]).sum(dtype=_WIDE)) for name in names if name in unit)
        length = math.sqrt(mean)
        return {
            "dispersion": math.sqrt(max(0.0, spread - mean)) / length if length else 0.0,
            "cosine": along / length if length else 0.0,
            "distance": math.sqrt(spread),
        }

    def _by_tag(self, parts: Tensors) -> dict[str, list[str]]:
        groups: dict[str, list[str]] = {}
        for name in parts:
            for tag in self.tags[name]:
                groups.setdefault(tag, []).append(name)
        return groups
