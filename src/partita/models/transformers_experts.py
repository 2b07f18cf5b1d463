"""The gradient of the experts of transformers' models, so that the compiler can follow it.

In compiled code, transformers multiplies float32 states by the weights of their experts in an operation of its own. Its
gradient reads from a tensor how many states each expert has, which stops the compiler. Here it is one operation.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from transformers.integrations import moe

Gradients = tuple[torch.Tensor, torch.Tensor]


def _gradients(grad: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> Gradients:
    """Return the gradients of `states`, (row, in), sorted by expert, and of `weight`, (expert, in, out)."""
    given = SimpleNamespace(saved_tensors=(states, weight), offs=ends)
    of_states, of_weight, _ = moe._grouped_mm_fallback_backward(given, grad)
    return of_states, of_weight


def _shapes(grad: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> Gradients:
    return torch.empty_like(states), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    return (*torch.ops.partita.grouped_mm_gradients(grad, *ctx.saved_tensors), None)


@cache
def use_gradients() -> None:
    """Replace the gradient, unless this version of transformers has no such operation."""
    if not hasattr(moe, "_grouped_mm_fallback_backward"):
        return
    torch.library.custom_op(
        "partita::grouped_mm_gradients",
        _gradients,
        mutates_args=(),
        schema="(Tensor grad, Tensor states, Tensor weight, Tensor ends) -> (Tensor, Tensor)",
    )
    torch.library.register_fake("partita::grouped_mm_gradients", _shapes)
    torch.library.register_autograd("transformers::grouped_mm_fallback", _backward, setup_context=_save)
