"""Names that torch does not promise to keep. No other module uses a private name of torch.

`tests/core/test_torch_private.py` says which of them a new version of torch lacks or changed. The last column is the
public replacement, where there is one.

    foreach_*              one kernel for a list of tensors; on a GPU, launching a      a loop over the list
                           kernel per tensor costs more than the arithmetic
    fused_adamw_           AdamW with the step count and learning rate on the device,   torch.optim.AdamW(fused=True)
                           as a CUDA graph requires
    is_view                whether a tensor shares the memory of another
    version                how often a tensor was changed in place
    without_vmap           the tensor of all clients, from that of one under torch.vmap
    client_dimension       its dimension of clients
    is_batchedtensor       whether a function runs under torch.vmap
    is_gradtrackingtensor  whether a function runs under torch.func.grad
    own_parameters         the dict that a module reads its parameters from             torch.func.functional_call
    vmap_fallback_warnings torch.vmap warns where it runs an operation client by client
    compile_kernel         compiles a CUDA kernel from source
    end_allocate_to_pool   ends what a failed capture of a CUDA graph began
    release_pool           frees the memory that only a failed capture uses
    limit_recompiles       number of programs that torch.compile may make of a function
    operations             the FLOPs of a call, without the import of the compiler          FlopCounterMode
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

# Name here -> name in torch. `__getattr__` looks it up, because importing this module must not import torch.
PRIVATE = {
    "foreach_add": "_foreach_add",
    "foreach_add_": "_foreach_add_",
    "foreach_addcdiv_": "_foreach_addcdiv_",
    "foreach_addcmul_": "_foreach_addcmul_",
    "foreach_copy_": "_foreach_copy_",
    "foreach_div_": "_foreach_div_",
    "foreach_lerp_": "_foreach_lerp_",
    "foreach_mul": "_foreach_mul",
    "foreach_mul_": "_foreach_mul_",
    "foreach_norm": "_foreach_norm",
    "foreach_sqrt": "_foreach_sqrt",
    "foreach_sub": "_foreach_sub",
    "foreach_sub_": "_foreach_sub_",
    "foreach_zero_": "_foreach_zero_",
    "fused_adamw_": "_fused_adamw_",
    "is_batchedtensor": "_C._functorch.is_batchedtensor",
    "is_gradtrackingtensor": "_C._functorch.is_gradtrackingtensor",
    "compile_kernel": "cuda._compile_kernel",
    "end_allocate_to_pool": "cuda.memory._cuda_endAllocateToPool",
    "release_pool": "cuda.memory._cuda_releasePool",
}


def __getattr__(name: str) -> Any:
    if name not in PRIVATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = attrgetter(PRIVATE[name])(torch)
    return found


class RecompileLimitError(RuntimeError):
    """A compiled function needs more programs than allowed."""


def is_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor shares the memory of another."""
    return tensor._is_view()


def version(tensor: torch.Tensor) -> int:
    """Return a number that grows with each change in place."""
    return tensor._version


def without_vmap(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor of all clients under `torch.vmap`; outside it, the tensor itself."""
    functorch = torch._C._functorch
    return functorch.get_unwrapped(value) if functorch.is_batchedtensor(value) else value


def client_dimension(value: torch.Tensor) -> int | None:
    """Return the dimension of the clients in `without_vmap(value)`; None if there is none."""
    functorch = torch._C._functorch
    return functorch.maybe_get_bdim(value) if functorch.is_batchedtensor(value) else None


@contextmanager
def vmap_fallback_warnings() -> Iterator[None]:
    """Make torch.vmap warn where it has no batching rule and runs an operation for one element after another."""
    show = torch._C._debug_only_display_vmap_fallback_warnings  # type: ignore[attr-defined]
    show(True)
    try:
        yield
    finally:
        show(False)


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return the dict of a module's own parameters. Entries may be replaced, also by plain tensors."""
    return module._parameters


@contextmanager
def limit_recompiles(limit: int) -> Iterator[None]:
    """Let torch.compile make at most `limit` programs of a function that is called in this context.

    Raises:
        RecompileLimitError: If a function compiled with `fullgraph` needs more.
    """
    from torch import _dynamo  # the import takes a second

    try:
        with _dynamo.config.patch(recompile_limit=limit):
            yield
    except _dynamo.exc.FailOnRecompileLimitHit as error:
        raise RecompileLimitError(f"a function needs more than {limit} compiled programs") from error


def operations(function: Callable[[], object]) -> int:
    """Return the FLOPs of a call, as torch's FlopCounterMode counts them, which would import the compiler."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
        total: int = 0

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in flop_registry and func is not torch.ops.prim.device.default:
                with self:
                    parts = func.decompose(*args, **(kwargs or {}))
                if parts is not NotImplemented:
                    return parts
            out = func(*args, **(kwargs or {}))
            if (formula := flop_registry.get(func._overloadpacket)) is not None:
                self.total += formula(*args, **(kwargs or {}), out_val=out)
            return out

    with Counter() as counter:  # type: ignore[no-untyped-call]
        function()
    total: int = counter.total
    return total
