"""Which examples a client trains on in each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice

import torch
from torch import Tensor

from partita.core import memory
from partita.core.rng import Key
from partita.core.settings import Training

MANY_EXAMPLES = 10**8  # examples in a client's round, from which their order is a matter of memory


@dataclass(frozen=True, eq=False)
class BatchSchedule:
    """One client's batches: which examples, one batch after another, and how many are in each.

    A batch is cut off when it is asked for: a GPU that waits for the first does not wait for the others.
    """

    order: Tensor  # (example,)
    sizes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Tensor]:
        start = 0
        for size in self.sizes:
            yield self.order[start : start + size]
            start += size


def count_steps(count: int, training: Training, epochs: int | None, fraction: float = 1.0) -> int:
    """A client's steps in one phase."""
    per_epoch = -(-count // training.batch_size)
    total = training.steps if training.steps is not None and epochs is None else (epochs or training.epochs) * per_epoch
    steps = max(1, int(total * fraction))
    if (
        numbers := steps * min(count, training.batch_size)
    ) > MANY_EXAMPLES:  # asking what is free takes longer than most calls
        memory.require(16 * numbers, f"the order of examples in {steps:,} steps", "train fewer epochs or steps a round")
    return steps


def shuffled_batches(
    count: int, training: Training, epochs: int | None, key: Key, fraction: float = 1.0
) -> BatchSchedule:
    """Every epoch is a new permutation, and its last batch may be short."""
    sizes = _batch_sizes(count, training.batch_size, count_steps(count, training, epochs, fraction))
    orders = [(key / epoch).permutation(count) for epoch in range(-(-sum(sizes) // count))]
    return BatchSchedule((orders[0] if len(orders) == 1 else torch.cat(orders))[: sum(sizes)], sizes)


@lru_cache(maxsize=256)  # clients of one size share them
def _batch_sizes(count: int, batch: int, steps: int) -> tuple[int, ...]:
    epoch = [*[batch] * (count // batch), *[count % batch] * (count % batch > 0)]
    return tuple(islice(cycle(epoch), steps))


def poisson_batches(
    count: int, training: Training, epochs: int | None, key: Key, fraction: float = 1.0
) -> BatchSchedule:
    """By Poisson: in each step every example takes part by itself, so a batch may also be empty."""
    share = min(1.0, training.batch_size / count)
    batches = [(key / step).poisson(count, share) for step in range(count_steps(count, training, epochs, fraction))]
    return BatchSchedule(torch.cat(batches), tuple(map(len, batches)))
