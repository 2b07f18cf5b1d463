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
from itertools import chain

import torch
from torch import Tensor

from partita.core import tree
from partita.core.method import Update
from partita.core.model import Model
from partita.core.tree import Mean, Tensors

_WIDE = torch.float64
_Place = tuple[str, str]  # a tag, and a name that has it
Measures = dict[str, dict[str, float]]  # tag -> measure -> value


class Drift:
    def __init__(self, model: Model) -> None:
        self.tags = model.tags
        self.mean = Mean()
        self.units: dict[_Place, Tensor] = {}  # the sum of d_i / |d_i|, each with its weight
        self.square: dict[str, float] = {}  # by name, the sum of |d_i|^2, each with its weight
        self.weight: dict[str, float] = {}
        self.pointed: dict[str, float] = {}  # by tag, the weight of those who moved
        self.known: dict[tuple[str, ...], list[list[_Place]]] = {}

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
        turns = self._turns(tuple(delta))
        lengths: dict[str, float] = {}
        for tag, name in chain(*turns):
            lengths[tag] = lengths.get(tag, 0.0) + squares[name]
        shares = {tag: weight / math.sqrt(square) for tag, square in lengths.items() if square > 0}
        for tag in shares:
            self.pointed[tag] = self.pointed.get(tag, 0.0) + weight
        for places in turns:
            self._point([place for place in places if place[0] in shares], delta, shares)

    def _point(self, places: Sequence[_Place], delta: Tensors, shares: Mapping[str, float]) -> None:
        """For all names in two calls, since on a GPU each call costs more than the arithmetic."""
        if not places:
            return
        values = [tree.wide(delta[name]) for _, name in places]
        scaled = dict(zip(places, torch._foreach_mul(values, [shares[tag] for tag, _ in places]), strict=True))
        if old := [place for place in places if place in self.units]:
            torch._foreach_add_([self.units[place] for place in old], [scaled[place] for place in old])
        self.units = {**scaled, **self.units}

    def measures(self) -> Measures:
        mean, groups = tree.squares(self.mean.value), dict[str, list[str]]()
        for tag, name in chain(*self._turns(tuple(self.mean.value))):
            groups.setdefault(tag, []).append(name)
        dots = [(unit * self.mean.value[name]).sum(dtype=_WIDE) for (_, name), unit in self.units.items()]
        along = dict(zip(self.units, torch.stack(dots).tolist() if dots else [], strict=True))
        return {tag: self._measure(tag, names, mean, along) for tag, names in sorted(groups.items())}

    def _measure(
        self, tag: str, names: Sequence[str], squares: Mapping[str, float], along: Mapping[_Place, float]
    ) -> dict[str, float]:
        spread = sum(self.square[name] / self.weight[name] for name in names)
        mean = sum(squares[name] for name in names)
        length, pointed = math.sqrt(mean), self.pointed.get(tag)
        # A client that sent some of the tag's names points nowhere along the others.
        cosine = sum(along.get((tag, name), 0.0) for name in names) / pointed if pointed else 0.0
        return {
            "dispersion": math.sqrt(max(0.0, spread - mean)) / length if length else 0.0,
            "cosine": cosine / length if length else 0.0,
            "distance": math.sqrt(spread),
        }

    def _turns(self, names: tuple[str, ...]) -> list[list[_Place]]:
        """Every name under each of its tags. In a turn each comes once, so that a copy of them is one model at most."""
        if names not in self.known:
            sorted_tags = {name: sorted(self.tags[name]) for name in names}
            most = max(map(len, sorted_tags.values()), default=0)
            self.known[names] = [
                [(tags[turn], name) for name, tags in sorted_tags.items() if turn < len(tags)] for turn in range(most)
            ]
        return self.known[names]
