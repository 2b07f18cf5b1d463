"""Forward passes compiled with `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from partita.core.tensors import Tensors
from partita.core.torch_private import RecompileLimitError, limit_recompiles
from partita.training.client_axis import ClientAxis, translate_errors

SMALL_MODEL = 2**26  # parameters of a whole block, up to which launching kernels costs more than computing
MAX_PROGRAMS = 128  # compiled programs of all blocks together; torch's own limit is 8


class CompileError(ValueError):
    """A model or a rule cannot be compiled."""


class CompiledVmap:
    """Turns the loss of one client into a compiled loss of a block. One program serves all batches with a mask.

    Args:
        axis: The clients.
        what: The model and method, for messages.
        combine: Whether to merge independent kernels into one, which helps where launching kernels takes the time.
    """

    def __init__(self, axis: ClientAxis, what: str, combine: bool) -> None:
        self.axis, self.what, self.combine = axis, what, combine
        self.programs: dict[bool, Callable[..., Any]] = {}

    def __call__(self, function: Callable[..., Any], dims: Sequence[Any]) -> Callable[..., Any]:
        masked = dims[-1] is not None
        if masked not in self.programs:
            whole = torch.vmap(function, in_dims=tuple(dims)) if self.axis.many else function
            self.programs[masked] = translate_errors(_compiled(whole, self.combine), self._error)
        return self.programs[masked]

    def _error(self, error: RuntimeError) -> CompileError:
        return CompileError(f"{self.what} cannot be compiled: {str(error).splitlines()[0]}; set engine.compile = false")


def _compiled(function: Callable[..., Any], combine: bool) -> Callable[..., Any]:
    """Compile a function. One program serves most shapes, except for one client, one example, or a mask."""

    def contiguous_gradients(trainable: Tensors, *rest: Any) -> Any:
        # Flattening makes each gradient contiguous, as the optimizer requires. The compiler does this at no cost; a
        # copy per name afterwards took a twelfth of a large model's step.
        return function({name: value.flatten().view(value.shape) for name, value in trainable.items()}, *rest)

    options: dict[str, Any] | None = {"combo_kernels": True} if combine else None
    program = torch.compile(contiguous_gradients, fullgraph=True, options=options)

    def call(*parts: Any) -> Any:
        try:
            with limit_recompiles(MAX_PROGRAMS):
                return program(*parts)
        except RecompileLimitError as error:
            raise RuntimeError(
                f"its clients' plans and batches need more than {MAX_PROGRAMS} compiled programs"
            ) from error

    return call
