"""The shapes of batches. Where steps are captured, batches are padded, so that few graphs serve all steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from partita.core.data import IGNORE_INDEX, Batch, Examples

DECODER = "decoder_"  # the start of the names of inputs that have the tokens of the targets
# Leading bits of padded numbers of clients and of tokens. A batch is padded by less than a half and by less than a
# quarter. Texts of a batch are short or long together with many others, so widths can be finer.
CLIENT_BITS, TOKEN_BITS = 2, 3


@dataclass(frozen=True)
class BatchPadding:
    """How to pad the batches of a trainer whose steps are captured.

    Attributes:
        multiple: Batches have a multiple of this number of units.
        full: The size of a full batch; None if sizes are drawn at random, as in Poisson sampling.
    """

    multiple: int
    full: int | None

    def units(self, size: int) -> int:
        """Return the padded size of a batch."""
        found = max(1, -(-size // self.multiple)) * self.multiple
        return found if self.full is None else min(found, self.full)


@dataclass(frozen=True)
class StepShape:
    """The shape of a step's batch.

    Attributes:
        active: The number of clients that take the step, the leading ones.
        clients: The number of clients in the batch. Those after the active ones have finished: they are masked.
        units: The number of units (examples or groups) of each client.
        masked: Whether the batch has a mask.
    """

    active: int
    clients: int
    units: int
    masked: bool


def step_shapes(sizes: Sequence[Sequence[int]], padding: BatchPadding | None = None) -> list[StepShape]:
    """Return the shape of each step of a block.

    Without padding, a batch has the clients that still train and the size of their largest batch. So it does for equal
    clients, whose batches have few shapes anyway. Otherwise all steps of a block have one size and a mask, and their
    numbers of clients are rounded up. A single client's full batches stay as they are.

    Args:
        sizes: The batch sizes of each client, ordered by their number, most first.
        padding: How to pad; None for steps that are not captured.
    """
    steps = [[own[step] for own in sizes if step < len(own)] for step in range(len(sizes[0]))]
    if padding is None or (padding.full is not None and len(sizes) > 1 and len({*map(tuple, sizes)}) == 1):
        return [_exact(step) for step in steps]
    if padding.full is None:
        return [
            StepShape(len(step), few_clients(len(step), len(sizes)), padding.units(max(step)), True) for step in steps
        ]
    if len(sizes) == 1:
        return [
            _exact(step) if step[0] == padding.full else StepShape(1, 1, padding.units(step[0]), True) for step in steps
        ]
    largest = padding.units(max(map(max, steps), default=0))
    return [StepShape(len(step), few_clients(len(step), len(sizes)), largest, True) for step in steps]


def _exact(step: Sequence[int]) -> StepShape:
    units = max(1, *step)
    return StepShape(len(step), len(step), units, min(step) < units)


def few_clients(count: int, most: int) -> int:
    """Round a number of clients up to one of few numbers, at most `most`."""
    return min(round_up(count, CLIENT_BITS), most)


def round_up(number: int, bits: int) -> int:
    """Return the next number whose binary digits after the first `bits` are zeros."""
    low = max(0, number.bit_length() - bits)
    return -(-number >> low) << low


def token_limits(examples: Examples) -> tuple[int, int] | None:
    """Return the longest padded rows of tokens: of the inputs, and of the targets; None if the examples are no texts.

    The second is 0 if the targets are not tokens. It is also that of a decoder's inputs.
    """
    return getattr(examples, "limits", None)


def widen(batch: Batch, limits: tuple[int, int], dim: int) -> Batch:
    """Pad the tokens of a batch to one of few widths.

    Args:
        batch: The batch.
        limits: The longest widths, as from `token_limits`.
        dim: The dimension of the tokens.
    """
    of_inputs, of_targets = limits
    inputs = {
        name: _widened(value, of_targets if name.startswith(DECODER) else of_inputs, dim, 0)
        for name, value in batch.inputs.items()
    }
    return replace(batch, inputs=inputs, targets=_widened(batch.targets, of_targets, dim, IGNORE_INDEX))


def _widened(value: torch.Tensor, limit: int, dim: int, fill: int) -> torch.Tensor:
    if value.ndim <= dim:
        return value
    missing = min(round_up(value.shape[dim], TOKEN_BITS), limit) - value.shape[dim]
    if missing <= 0:
        return value
    shape = *value.shape[:dim], missing, *value.shape[dim + 1 :]
    return torch.cat([value, value.new_full(shape, fill)], dim)
