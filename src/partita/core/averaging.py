"""Weighted means over a stream of updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from partita.core.tensors import Mean, Tensors
from partita.core.update import Aggregate, Update


def average(
    updates: Iterable[Update],
    over: Literal["senders", "cohort"] | float = "senders",
    weigh: Callable[[Update], float] = lambda update: update.weight,
) -> Aggregate:
    """Return the weighted mean of deltas and slots, in memory that does not grow with the number of updates.

    Args:
        updates: The updates; consumed once.
        over: The divisor for each name: the total weight of the clients that sent the name ("senders"), the total
            weight of all clients ("cohort"), or a number.
        weigh: The weight of an update; by default its number of training examples.
    """
    delta, slots, count, total = Mean(), dict[str, Mean](), 0, 0.0
    for update in updates:
        weight = weigh(update)
        count, total = count + 1, total + weight
        delta.add(update.delta, weight)
        for slot, part in update.slots.items():
            slots.setdefault(slot, Mean()).add(part, weight)
    divisor = total if over == "cohort" else over

    def value(mean: Mean) -> Tensors:
        return mean.value if isinstance(divisor, str) else mean.over(divisor)

    return Aggregate(value(delta), {slot: value(mean) for slot, mean in slots.items()}, count)
