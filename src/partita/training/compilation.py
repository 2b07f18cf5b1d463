"""Forward passes compiled with `torch.compile`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from partita.core.layer_compiler import compiled_layers
from partita.core.tensors import Tensors
from partita.core.torch_private import RecompileLimitError, limit_recompiles
from partita.training.client_axis import ClientAxis
from partita.training.gradients import GradientEstimator

SMALL_MODEL = 2**26  # parameters of a whole block, up to which launching kernels costs more than computing
MAX_PROGRAMS = 128  # compiled programs of all blocks together; torch's own limit is 8


class CompileError(ValueError):
    """A model or a rule cannot be compiled."""


class CompiledVmap:
    """Turns the loss of one client into a compiled loss of a block. One program serves all batches with a mask.

    Args:
        axis: The clients.
        combine: Whether to merge independent kernels into one, which helps where launching kernels takes the time.
    """

    def __init__(self, axis: ClientAxis, combine: bool) -> None:
        self.axis, self.combine = axis, combine
        self.programs: dict[bool, Callable[..., Any]] = {}

    def __call__(self, function: Callable[..., Any], dims: Sequence[Any]) -> Callable[..., Any]:
        masked = dims[-1] is not None
        if masked not in self.programs:
            whole = torch.vmap(function, in_dims=tuple(dims)) if self.axis.many else function
            self.programs[masked] = _compiled(whole, self.combine, self.axis.many)
        return self.programs[masked]


class CompiledLayers:
    """Turns the loss of one client into the loss of a block, in which each layer of the model is compiled on its own.

    All layers that are alike share a program, also those of other blocks. What is outside the layers runs eagerly.

    Args:
        axis: The clients.
        combine: As for `CompiledVmap`.
    """

    def __init__(self, axis: ClientAxis, combine: bool) -> None:
        self.axis, self.combine = axis, combine

    def __call__(self, function: Callable[..., Any], dims: Sequence[Any]) -> Callable[..., Any]:
        whole = torch.vmap(function, in_dims=tuple(dims)) if self.axis.many else function

        def call(*parts: Any) -> Any:
            with compiled_layers(lambda layer: _layer_program(layer, self.combine)):
                return whole(*parts)

        return call


class CompiledGradients:
    """Gradients of a compiled loss. If the compiler fails, those of the plain loss from then on, or an error.

    Args:
        compiled: Gradients of the compiled loss.
        plain: Gradients of the plain loss.
        what: The model and method, for messages.
        on_failure: Called with the error when the compiler fails; None to raise it.
    """

    def __init__(
        self,
        compiled: GradientEstimator,
        plain: GradientEstimator,
        what: str,
        on_failure: Callable[[CompileError], None] | None = None,
    ) -> None:
        self.current, self.plain, self.what, self.on_failure = compiled, plain, what, on_failure

    def __call__(
        self, trainable: Tensors, values: Sequence[Any], dims: Sequence[Any], count: int
    ) -> tuple[Tensors, torch.Tensor]:
        if self.current is self.plain:
            return self.plain(trainable, values, dims, count)
        try:
            with _in_compiler():
                return self.current(trainable, values, dims, count)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler's own mistakes have any type, also in the backward pass
            failure = CompileError(f"{self.what} cannot be compiled: {_reason(error)}")
            if _is_capturing():
                raise failure from error
            failure.__cause__ = None if self.on_failure else error  # which holds the tensors of the step
        forget_programs()
        found = self.plain(trainable, values, dims, count)  # raises if the error is not the compiler's
        if self.on_failure is None:
            raise CompileError(f"{failure}; set engine.compile = false") from failure.__cause__
        self.current = self.plain
        self.on_failure(failure)
        return found


def _reason(error: Exception) -> str:
    """Return the first line of an error; with the next one, if it only announces that one."""
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first


def forget_programs() -> None:
    """Drop all compiled programs of this process, so that nothing of a failed one is left."""
    _layer_program.cache_clear()
    torch.compiler.reset()


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@cache
def _layer_program(function: Callable[..., Any], combine: bool) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, options=_options(combine))


def _options(combine: bool) -> dict[str, Any] | None:
    return {"combo_kernels": True} if combine else None


@contextmanager
def _in_compiler() -> Iterator[None]:
    """Allow more programs than torch does, and leave out what the compiler says of itself."""
    try:
        with limit_recompiles(MAX_PROGRAMS), warnings.catch_warnings():
            # The compiler reads `grad` of a layer's inputs, which are not leaves. It follows cached functions. And the
            # precision of float32 is chosen: TensorFloat32 would change results.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
            warnings.filterwarnings("ignore", r"\s*Online softmax is disabled")
            yield
    except RecompileLimitError as error:
        raise RuntimeError(f"its clients' plans and batches need more than {MAX_PROGRAMS} compiled programs") from error


def _compiled(function: Callable[..., Any], combine: bool, of_block: bool) -> Callable[..., Any]:
    """Compile a function. One program serves most shapes, except for one client, one example, or a mask."""

    def contiguous_gradients(trainable: Tensors, *rest: Any) -> Any:
        # Flattening makes each gradient contiguous, as the optimizer requires. The compiler does this at no cost; a
        # copy per name afterwards took a twelfth of a large model's step.
        return function({name: value.flatten().view(value.shape) for name, value in trainable.items()}, *rest)

    def contiguous_gradients_of_block(*parts: Any) -> Any:  # see `run_layer_of_block` for why it is a function apart
        return contiguous_gradients(*parts)

    made = contiguous_gradients_of_block if of_block else contiguous_gradients
    return torch.compile(made, fullgraph=True, options=_options(combine))
