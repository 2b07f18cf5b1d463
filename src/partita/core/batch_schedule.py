"""Which examples a client trains on in each step: shuffled or Poisson-sampled batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice

import torch

from partita.core import memory
from partita.core.data import Examples, text_lengths
from partita.core.rng import Key
from partita.core.settings import RunError, Training

MEGA_BATCH = 50  # steps whose examples are sorted by length together; transformers has this number
MANY_EXAMPLES = 10**8  # check free memory before creating an order of more examples than this


@dataclass(frozen=True, eq=False)
class BatchSchedule:
    """One client's batches.

    Iterating yields the example indices of one batch at a time. Batches are sliced on demand, so a GPU can start on the
    first before the others exist.

    Attributes:
        order: Example indices of all batches, one batch after another, of shape (example,).
        sizes: The size of each batch.
    """

    order: torch.Tensor
    sizes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[torch.Tensor]:
        start = 0
        for size in self.sizes:
            yield self.order[start : start + size]
            start += size


def count_steps(count: int, training: Training, epochs: int | None, fraction: float = 1.0) -> int:
    """Return a client's number of steps in one phase.

    Args:
        count: The client's number of examples.
        training: The training settings.
        epochs: The phase's epochs; None for `training.steps` or `training.epochs`.
        fraction: The fraction of the steps that the client completes; at least one step remains.

    Raises:
        SizeError: If the order of examples would not fit into memory.
    """
    per_epoch = -(-count // training.examples_per_step)
    total = training.steps if training.steps is not None and epochs is None else (epochs or training.epochs) * per_epoch
    steps = max(1, int(total * fraction))
    numbers = steps * min(count, training.examples_per_step)
    if numbers > MANY_EXAMPLES:  # querying free memory takes longer than most calls of this function
        memory.require(
            16 * numbers, f"the order of examples in {steps:,} steps", "train fewer epochs or steps per round"
        )
    return steps


def shuffled_batches(
    count: int, training: Training, epochs: int | None, key: Key, fraction: float = 1.0
) -> BatchSchedule:
    """Return batches that pass over all examples in a new random order in each epoch.

    The last batch of an epoch may be smaller.

    Args:
        count: The client's number of examples.
        training: The training settings.
        epochs: The phase's epochs; None for `training.steps` or `training.epochs`.
        key: The random key of this client, round and phase.
        fraction: The fraction of the steps that the client completes.
    """
    sizes = _batch_sizes(count, training.examples_per_step, count_steps(count, training, epochs, fraction))
    orders = [(key / epoch).permutation(count) for epoch in range(-(-sum(sizes) // count))]
    return BatchSchedule((orders[0] if len(orders) == 1 else torch.cat(orders))[: sum(sizes)], sizes)


@lru_cache(maxsize=256)  # clients with equal numbers of examples share the tuple
def _batch_sizes(count: int, batch: int, steps: int) -> tuple[int, ...]:
    epoch = [*[batch] * (count // batch), *[count % batch] * (count % batch > 0)]
    return tuple(islice(cycle(epoch), steps))


def poisson_batches(
    count: int, training: Training, epochs: int | None, key: Key, fraction: float = 1.0
) -> BatchSchedule:
    """Return batches by Poisson sampling.

    In each step every example is included independently, with probability `min(1, batch_size / count)`. Batch sizes
    vary, and a batch may be empty.

    Args:
        count: The client's number of examples.
        training: The training settings.
        epochs: The phase's epochs; None for `training.steps` or `training.epochs`.
        key: The random key of this client, round and phase.
        fraction: The fraction of the steps that the client completes.
    """
    share = min(1.0, training.batch_size / count)
    batches = [(key / step).poisson(count, share) for step in range(count_steps(count, training, epochs, fraction))]
    return BatchSchedule(torch.cat(batches), tuple(map(len, batches)))


def group_by_length(schedule: BatchSchedule, lengths: torch.Tensor, training: Training) -> BatchSchedule:
    """Sort shuffled batches so that each holds texts of similar lengths.

    Each epoch is cut into mega-batches of `MEGA_BATCH` steps, and each of these is sorted, longest first. A mega-batch
    keeps its examples and a step its size, so a phase of few steps trains on the same texts as without grouping.

    All clients go from long to short. So those of a block, whose batches are padded to the longest text of all of them,
    are wide and narrow together.

    Args:
        schedule: The batches, from `shuffled_batches`.
        lengths: The length of each of the client's examples, (example,).
        training: The training settings.
    """
    epochs = torch.split(schedule.order, len(lengths))  # the last one may be cut short
    parts = [part for epoch in epochs for part in torch.split(epoch, MEGA_BATCH * training.examples_per_step)]
    order = torch.cat([part[lengths[part].argsort(descending=True, stable=True)] for part in parts])
    return BatchSchedule(order, schedule.sizes)


def lengths_to_group(examples: Examples, indices: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens of each example at `indices`, (example,), for `group_by_length`.

    Raises:
        RunError: If the examples are not texts.
    """
    lengths = text_lengths(examples, indices)
    if lengths is None:
        raise RunError(
            "training.group_by_length needs texts, and these examples have no lengths in tokens; leave it out"
        )
    return lengths
