"""Leave `torch.vmap`: call a function of whole blocks from code that is written for one client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from partita.core import torch_private

# (values, dims) -> results. Values have their client dimension at `dims` (None: the same for all), results first.
BlockFunction = Callable[[Sequence[torch.Tensor], Sequence[int | None]], tuple[torch.Tensor, ...]]


def outside_vmap(function: BlockFunction, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Call a function outside the innermost `torch.vmap`, with the client dimension of each value.

    Autograd sees the operations of the function itself, as if they had been called outside `torch.vmap` directly.

    Args:
        function: Computes the results of a whole block.
        values: The values of one client. At least one must differ between clients.
    """
    results: tuple[torch.Tensor, ...] = _OutsideVmap.apply(function, *values)  # type: ignore[no-untyped-call]
    return results


def under_vmap(values: Sequence[torch.Tensor]) -> bool:
    """Whether one of the values differs between the clients of a `torch.vmap`."""
    return any(map(torch_private.is_batchedtensor, values))


class _OutsideVmap(torch.autograd.Function):
    @staticmethod
    def forward(function: BlockFunction, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise AssertionError("it is only called under vmap, with a value that has the client dimension")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: autograd sees the operations of the function."""

    @staticmethod
    def vmap(
        info: Any, dims: Sequence[int | None], function: BlockFunction, *values: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        results = function(values, dims[1:])
        return results, (0,) * len(results)
