"""Tensors as integers modulo 2**bits: fixed-point numbers whose sum over all clients cannot overflow.

A client's vector holds its weight, its weight times its loss, and its weight times every value of its delta and slots.
From the sum of the vectors follow the weighted means, and nothing about a single client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

import torch

from partita.core.tensors import Slots, Tensors
from partita.core.update import Aggregate, Update
from partita.secure_aggregation.encoding import ProtocolError

DELTA = "delta"
WEIGHT, LOSS, NUMBERS = 0, 1, 2  # places of the weight and of weight times loss, and how many such places there are


class OutOfRange(ProtocolError):
    """A client's number does not fit the fixed-point format."""


@dataclass(frozen=True)
class Layout:
    """The order of a vector: the weight, weight times loss, and then the tensors of the delta and of each slot.

    Attributes:
        entries: `(slot, name, shape)` of each tensor, sorted; the delta has the slot "delta".
        with_loss: Whether clients report a loss. If not, its place holds 0.
    """

    entries: tuple[tuple[str, str, tuple[int, ...]], ...]
    with_loss: bool

    @cached_property
    def length(self) -> int:
        """The length of a vector."""
        return NUMBERS + sum(math.prod(shape) for _, _, shape in self.entries)


def layout_of(
    delta: Mapping[str, torch.Tensor], slots: Mapping[str, Mapping[str, torch.Tensor]], with_loss: bool
) -> Layout:
    """Return the layout of updates with these names and shapes.

    Args:
        delta: Any tensors with the names and shapes of a delta.
        slots: The same for each slot.
        with_loss: Whether clients report a loss.
    """
    parts = {DELTA: delta, **slots}
    entries = sorted((slot, name, tuple(value.shape)) for slot, part in parts.items() for name, value in part.items())
    return Layout(tuple(entries), with_loss)


@dataclass(frozen=True)
class FixedPoint:
    """A fixed-point format.

    Attributes:
        bits: 32 or 64. Sums are modulo 2**bits.
        clients: The largest number of clients in a sum.
        max_weight: The largest weight of a client.
        max_value: The largest absolute value of a delta, slot or loss.

    Raises:
        ProtocolError: If a sum of such numbers does not fit.
    """

    bits: Literal[32, 64]
    clients: int
    max_weight: float
    max_value: float

    def __post_init__(self) -> None:
        if self.exponent < 0:
            raise ProtocolError(
                f"the sum of {self.clients} clients with up to {self.max_weight:g} examples and values up to "
                f"{self.max_value:g} does not fit in {self.bits} bits; "
                + ("set secure_aggregation.bits = 64, or " if self.bits == 32 else "")
                + "lower secure_aggregation.max_value or federation.max_examples"
            )

    @cached_property
    def exponent(self) -> int:
        """The number x becomes round(x * 2**exponent). The largest exponent for which no sum overflows."""
        # Half a unit for the rounding of each client's number. Fractions, because 2**63 - 1 is not a float.
        room = Fraction(2 ** (self.bits - 1) - 1, self.clients) - Fraction(1, 2)
        units = room / (Fraction(self.max_weight) * Fraction(max(1.0, self.max_value)))
        return math.floor(units).bit_length() - 1 if units >= 1 else -1

    @property
    def scale(self) -> float:
        """The factor between numbers and integers, a power of two."""
        return 2.0**self.exponent

    @property
    def dtype(self) -> torch.dtype:
        """The type of a vector."""
        return torch.int32 if self.bits == 32 else torch.int64

    def resolution(self, clients: int, weight: float) -> float:
        """Return the largest error of a mean, beside the rounding of float64.

        Args:
            clients: The number of clients in the sum.
            weight: The sum of their weights, or another divisor.
        """
        return clients * 0.5 / self.scale / weight

    def encode(self, update: Update, layout: Layout) -> torch.Tensor:
        """Return the vector of an update, on the CPU.

        Raises:
            OutOfRange: If a number is not finite or too large.
            ProtocolError: If the update does not have the tensors of the layout.
        """
        weight = float(update.weight)
        if not 0 <= weight <= self.max_weight:
            raise OutOfRange(
                f"its weight is {weight:g}, and the largest weight in the sum is {self.max_weight:g}; raise "
                "federation.max_examples, or correct the registered number of examples"
            )
        if layout != layout_of(update.delta, update.slots, layout.with_loss):
            raise ProtocolError(
                "its update has other names or shapes than the plan of the round; all clients of a round must send the "
                "same"
            )
        vector = torch.zeros(layout.length, dtype=self.dtype)
        vector[WEIGHT] = round(weight * self.scale)
        if layout.with_loss:
            if update.loss is None:
                raise ProtocolError("it reports no loss, but the others of the round do")
            vector[LOSS] = int(self._integers("its loss", torch.tensor([update.loss], dtype=torch.float64), weight))
        start, parts = NUMBERS, {DELTA: update.delta, **update.slots}
        for slot, name, shape in layout.entries:
            stop = start + math.prod(shape)
            vector[start:stop] = self._integers(f"'{name}' of its {slot}", parts[slot][name], weight)
            start = stop
        return vector

    def decode(self, vector: torch.Tensor, layout: Layout, clients: int, over: float | None = None) -> SecureMean:
        """Return the weighted mean from the sum of `clients` vectors.

        Args:
            vector: The sum of the vectors.
            layout: The layout of the vectors.
            clients: The number of clients in the sum.
            over: The divisor; None for the sum of the weights.

        Raises:
            ProtocolError: If the sum of the weights is not a positive number, so that it has no mean.
        """
        weight = float(vector[WEIGHT]) / self.scale
        if not 0 < weight <= clients * self.max_weight:
            raise ProtocolError(
                f"the weights of {clients} clients add up to {weight:g}, which is impossible; at least one client "
                "broke the protocol"
            )
        divisor = weight if over is None else over
        delta: Tensors = {}
        slots: dict[str, Tensors] = {}
        start = NUMBERS
        for slot, name, shape in layout.entries:
            stop = start + math.prod(shape)
            value = (vector[start:stop].double() / (self.scale * divisor)).view(shape)
            (delta if slot == DELTA else slots.setdefault(slot, {}))[name] = value
            start = stop
        loss = float(vector[LOSS]) / self.scale / weight if layout.with_loss else None
        return SecureMean(Aggregate(delta, slots, clients), weight, loss, self.resolution(clients, divisor))

    def _integers(self, what: str, value: torch.Tensor, weight: float) -> torch.Tensor:
        numbers = value.detach().cpu().double().flatten()
        largest = float(numbers.abs().max()) if len(numbers) else 0.0
        if not largest <= self.max_value:  # also refuses NaN
            raise OutOfRange(
                f"{what} has the value {largest:g}, and the largest is {self.max_value:g}; "
                + (
                    "raise secure_aggregation.max_value, lower training.lr, or set training.clip"
                    if math.isfinite(largest)
                    else "lower training.lr or set training.clip"
                )
            )
        return (numbers * (weight * self.scale)).round_().to(self.dtype)


@dataclass(frozen=True)
class SecureMean:
    """The weighted mean of a round's updates.

    Attributes:
        aggregate: The mean of delta and slots, in float64 on the CPU.
        weight: The sum of the weights.
        loss: The weighted mean of the losses; None if clients report none.
        resolution: The largest error of a value of the mean.
    """

    aggregate: Aggregate
    weight: float
    loss: float | None
    resolution: float


def cast_like(mean: Aggregate, like: Mapping[str, torch.Tensor]) -> Aggregate:
    """Return the mean with the types and devices that a mean in clear has: float32, or float64 where `like` has it.

    Args:
        mean: A mean in float64 on the CPU.
        like: Tensors by parameter name, such as the server's parameters.
    """

    def cast(part: Tensors) -> Tensors:
        types = {name: torch.promote_types(like[name].dtype, torch.float32) for name in part}
        return {name: value.to(like[name].device, types[name]) for name, value in part.items()}

    slots: Slots = {slot: cast(part) for slot, part in mean.slots.items()}
    return Aggregate(cast(mean.delta), slots, mean.cohort)
