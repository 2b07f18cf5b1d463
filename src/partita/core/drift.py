"""Client drift by tag, measured on the stream of updates in memory that does not grow with the cohort.

For the updates d_i of a round with weights p_i and mean m, over the names of one tag:

    dispersion  sqrt(sum p_i |d_i - m|^2) / |m|     0 if all updates are equal
    cosine      sum p_i cos(d_i, m)                 1 if all updates have the same direction
    distance    sqrt(sum p_i |d_i|^2)               how far clients moved from the anchor

If clients send different names, p_i are the weights among the clients that sent a name; for the cosine, among those
that sent any name of the tag with a delta that is not zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from partita.core import tensors
from partita.core.model import Model
from partita.core.packed import PackedTensors
from partita.core.tensors import Mean, Tensors
from partita.core.update import Update

# Elements of the updates that are processed together: on a GPU each call costs more than the arithmetic.
_MAX_ELEMENTS = 2**26
DriftMeasures = dict[str, dict[str, float]]  # tag -> measure -> value
Weights = Mapping[str, float]  # by tag, a client's weight divided by the norm of its delta


class Drift:
    """Measures the drift of one round."""

    def __init__(self, model: Model) -> None:
        self.tags = {name: sorted(tags) for name, tags in model.tags.items()}
        self.mean = Mean()
        self.square: dict[str, float] = {}  # by name, the weighted sum of |d_i|^2
        self.nonzero_weight: dict[str, float] = {}  # by tag, the total weight of clients whose delta is not zero
        self.units: Tensors = {}  # by name (tag of the name, element), the weighted sum of d_i / |d_i|
        self.queued: list[tuple[PackedTensors, Weights]] = []  # deltas that are not yet added to `units`

    def add(self, update: Update) -> None:
        """Record the drift of an update."""
        if not update.weight or not update.delta:
            return
        delta, weight, facts = update.delta, update.weight, update.known_facts()
        self.mean.add(delta, weight)
        lengths: dict[str, float] = {}
        squares = facts.squares if facts else None
        for name, square in (tensors.squared_norms(delta) if squares is None else squares).items():
            self.square[name] = self.square.get(name, 0.0) + weight * square
            for tag in self.tags[name]:
                lengths[tag] = lengths.get(tag, 0.0) + square
        for tag, length in lengths.items():
            if length:
                self.nonzero_weight[tag] = self.nonzero_weight.get(tag, 0.0) + weight
        shares = {tag: weight / math.sqrt(length) if length else 0.0 for tag, length in lengths.items()}
        if not isinstance(delta, PackedTensors):
            self._add_directions({name: value.reshape(1, -1) for name, value in delta.items()}, [shares])
            return
        if self.queued and self.queued[0][0].layout is not delta.layout:
            self._add_directions(*self._drain_queue())
        self.queued.append((delta, shares))
        if len(self.queued) * len(delta.buffer) > _MAX_ELEMENTS:
            self._add_directions(*self._drain_queue())

    def _drain_queue(self) -> tuple[Tensors, list[Weights]]:
        """Empty the queue: by name, the deltas (client, element), and the weights of each client."""
        if not self.queued:
            return {}, []
        tables = self.queued[0][0].layout.per_name(torch.stack([delta.buffer for delta, _ in self.queued]))
        shares = [shares for _, shares in self.queued]
        self.queued = []
        return tables, shares

    def _add_directions(self, deltas: Tensors, shares: Sequence[Weights]) -> None:
        device = next(iter(deltas.values())).device
        table = torch.tensor([[weights[tag] for weights in shares] for name in deltas for tag in self.tags[name]])
        parts = torch.split(table.to(device, non_blocking=True), [len(self.tags[name]) for name in deltas])
        for (name, value), part in zip(deltas.items(), parts, strict=True):  # part: (tag of the name, client)
            both = part.to(tensors.upcast(value).dtype), tensors.upcast(value)
            self.units[name] = self.units[name].addmm_(*both) if name in self.units else torch.mm(*both)

    def measures(self) -> DriftMeasures:
        """Return the measures by tag, for all updates so far."""
        mean = self.mean.value
        squares, flat = tensors.squared_norms(mean), {name: value.flatten() for name, value in mean.items()}
        # Queued deltas are multiplied with the mean directly. Often all deltas are still queued.
        deltas, shares = self._drain_queue()
        dots = [torch.mv(tensors.upcast(value), flat[name]) for name, value in deltas.items()]
        dots += [torch.mv(value, flat[name]) for name, value in self.units.items()]
        values = iter(torch.cat(dots).tolist() if dots else [])
        groups: dict[str, list[str]] = {}
        for name in mean:
            for tag in self.tags[name]:
                groups.setdefault(tag, []).append(name)
        along = dict.fromkeys(groups, 0.0)
        for name in deltas:
            for weights, dot in zip(shares, values, strict=False):
                for tag in self.tags[name]:
                    along[tag] += weights[tag] * dot
        for name in self.units:
            for tag, dot in zip(self.tags[name], values, strict=False):
                along[tag] += dot
        return {tag: self._measure(tag, names, squares, along[tag]) for tag, names in sorted(groups.items())}

    def _measure(self, tag: str, names: Sequence[str], squares: Mapping[str, float], along: float) -> dict[str, float]:
        spread = sum(self.square[name] / self.mean.weight[name] for name in names)
        mean = sum(squares[name] for name in names)
        length, pointed = math.sqrt(mean), self.nonzero_weight.get(tag)
        return {
            "dispersion": math.sqrt(max(0.0, spread - mean)) / length if length else 0.0,
            "cosine": along / pointed / length if pointed and length else 0.0,
            "distance": math.sqrt(spread),
        }
