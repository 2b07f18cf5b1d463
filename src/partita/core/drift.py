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

from partita.core import tensors
from partita.core.method import Update
from partita.core.model import Model
from partita.core.packed import PackedTensors
from partita.core.tensors import Mean, Tensors

_MAX_ELEMENTS = (
    2**26
)  # numbers of updates that are looked at together: on a GPU each call costs more than the arithmetic
DriftMeasures = dict[str, dict[str, float]]  # tag -> measure -> value
Weights = Mapping[str, float]  # by tag, a client's weight over how far it moved


class Drift:
    def __init__(self, model: Model) -> None:
        self.tags = {name: sorted(tags) for name, tags in model.tags.items()}
        self.mean = Mean()
        self.square: dict[str, float] = {}  # by name, the sum of |d_i|^2, each with its weight
        self.pointed: dict[str, float] = {}  # by tag, the weight of those who moved
        self.units: Tensors = {}  # (tag of the name, number), the sum of d_i / |d_i|, each with its weight
        self.waiting: list[tuple[PackedTensors, Weights]] = []  # what is still to be added to that

    def watch(self, updates: Iterable[Update]) -> Iterator[Update]:
        """Hands every update on as it is."""
        for update in updates:
            if update.weight and update.delta:
                self._see(update.delta, update.weight)
            yield update

    def _see(self, delta: Mapping[str, Tensor], weight: float) -> None:
        self.mean.add(delta, weight)
        lengths: dict[str, float] = {}
        for name, square in tensors.squared_norms(delta).items():
            self.square[name] = self.square.get(name, 0.0) + weight * square
            for tag in self.tags[name]:
                lengths[tag] = lengths.get(tag, 0.0) + square
        for tag, length in lengths.items():
            if length:
                self.pointed[tag] = self.pointed.get(tag, 0.0) + weight
        shares = {tag: weight / math.sqrt(length) if length else 0.0 for tag, length in lengths.items()}
        if not isinstance(delta, PackedTensors):
            self._point({name: value.reshape(1, -1) for name, value in delta.items()}, [shares])
            return
        if self.waiting and self.waiting[0][0].layout is not delta.layout:
            self._point(*self._waited())
        self.waiting.append((delta, shares))
        if len(self.waiting) * len(delta.buffer) > _MAX_ELEMENTS:
            self._point(*self._waited())

    def _waited(self) -> tuple[Tensors, list[Weights]]:
        """By name (client, number), and the shares of each; from now on they wait no longer."""
        if not self.waiting:
            return {}, []
        tables = self.waiting[0][0].layout.per_name(torch.stack([delta.buffer for delta, _ in self.waiting]))
        shares = [shares for _, shares in self.waiting]
        self.waiting = []
        return tables, shares

    def _point(self, deltas: Tensors, shares: Sequence[Weights]) -> None:
        device = next(iter(deltas.values())).device
        table = torch.tensor([[each[tag] for each in shares] for name in deltas for tag in self.tags[name]])
        parts = torch.split(table.to(device, non_blocking=True), [len(self.tags[name]) for name in deltas])
        for (name, value), part in zip(deltas.items(), parts, strict=True):  # part: (tag of the name, client)
            both = part.to(tensors.upcast(value).dtype), tensors.upcast(value)
            self.units[name] = self.units[name].addmm_(*both) if name in self.units else torch.mm(*both)

    def measures(self) -> DriftMeasures:
        mean = self.mean.value
        squares, flat = tensors.squared_norms(mean), {name: value.flatten() for name, value in mean.items()}
        # Those who still wait are multiplied with the mean as they are, and mostly that is all.
        deltas, shares = self._waited()
        dots = [torch.mv(tensors.upcast(value), flat[name]) for name, value in deltas.items()]
        dots += [torch.mv(value, flat[name]) for name, value in self.units.items()]
        found = iter(torch.cat(dots).tolist() if dots else [])
        groups: dict[str, list[str]] = {}
        for name in mean:
            for tag in self.tags[name]:
                groups.setdefault(tag, []).append(name)
        along = dict.fromkeys(groups, 0.0)
        for name in deltas:
            for each, dot in zip(shares, found, strict=False):
                for tag in self.tags[name]:
                    along[tag] += each[tag] * dot
        for name in self.units:
            for tag, dot in zip(self.tags[name], found, strict=False):
                along[tag] += dot
        return {tag: self._measure(tag, names, squares, along[tag]) for tag, names in sorted(groups.items())}

    def _measure(self, tag: str, names: Sequence[str], squares: Mapping[str, float], along: float) -> dict[str, float]:
        spread = sum(self.square[name] / self.mean.weight[name] for name in names)
        mean = sum(squares[name] for name in names)
        length, pointed = math.sqrt(mean), self.pointed.get(tag)
        return {
            "dispersion": math.sqrt(max(0.0, spread - mean)) / length if length else 0.0,
            "cosine": along / pointed / length if pointed and length else 0.0,
            "distance": math.sqrt(spread),
        }
