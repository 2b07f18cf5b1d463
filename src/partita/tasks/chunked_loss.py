"""Cross-entropy of a linear head over a vocabulary, in chunks of tokens.

The logits of a batch can need more memory than the model: as many numbers as tokens times words. Here only those of
one chunk exist at a time. The forward pass computes their gradient as well. It is kept for a head that trains, unless
it is large: the backward pass then computes it once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from partita.core.data import IGNORE_INDEX
from partita.core.layer_compiler import layer_compiler
from partita.core.model import HeadOutput
from partita.core.outside_vmap import outside_vmap, under_vmap
from partita.core.tensors import upcast
from partita.core.torch_private import is_gradtrackingtensor
from partita.tasks.losses import mean_over_tokens, token_cross_entropy

FEW = 2**22  # logits of a client's batch, up to which they are computed at once
CHUNK = 2**26  # logits of a chunk
COMPILED_CHUNK = 2**28  # the same where the loss is compiled, which needs a third of the memory for each
KEPT_BYTES = 2**31  # size of the gradient of a block's logits, up to which it is kept for the backward pass


def linear_cross_entropy(out: HeadOutput, targets: torch.Tensor) -> torch.Tensor:
    """Return `token_cross_entropy` of an output, up to rounding.

    Args:
        out: The output.
        targets: Class indices (example, token). Tokens with IGNORE_INDEX do not count.
    """
    values = [out.states, out.weight, targets]
    # A compiler of the whole model, or torch.func.grad, needs operations that it knows.
    plain = torch.compiler.is_compiling() or any(map(is_gradtrackingtensor, values))
    if plain or targets.numel() * len(out.weight) <= FEW:
        return token_cross_entropy(out.logits, targets)
    values = [out.states.flatten(0, 1), out.weight, targets.flatten()]
    per_token = outside_vmap(_of_block, values)[0] if under_vmap(values) else _of_one(*values)
    return mean_over_tokens(per_token.unflatten(0, targets.shape), targets)


def _of_one(states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token, for states (token, width) and targets (token,)."""
    losses: torch.Tensor = _Chunks.apply(states.unsqueeze(0), weight.unsqueeze(0), targets.unsqueeze(0))
    return losses.squeeze(0)


def _of_block(values: Sequence[torch.Tensor], dims: Sequence[int | None]) -> tuple[torch.Tensor]:
    """`_of_one` for all clients of a block. Clients with the same head are one client with all their tokens."""
    clients = next(value.shape[dim] for value, dim in zip(values, dims, strict=True) if dim is not None)
    states, weight, targets = (
        value.expand(clients, *value.shape) if dim is None else value.movedim(dim, 0)
        for value, dim in zip(values, dims, strict=True)
    )
    if dims[1] is None:
        losses = _of_one(states.flatten(0, 1), values[1], targets.flatten())
        return (losses.view(targets.shape),)
    return (_Chunks.apply(states, weight, targets),)


class _Chunks(torch.autograd.Function):
    """The losses (client, token) from states (client, token, width), weights (client, class, width) and targets."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        device = states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
        trains, head_trains = ctx.needs_input_grad[:2]
        loss_and_gradient, chunk = _loss_and_gradient()
        with torch.autocast(device, enabled=False):
            inputs, head = states.to(dtype), weight.to(dtype)
            keeps = head_trains and inputs.shape[1] * head[..., 0].numel() * head.itemsize <= KEPT_BYTES
            losses, parts, kept = [], [], []
            for rows, wanted in _chunks(inputs, head, targets, chunk):
                loss, gradient = loss_and_gradient(rows @ head.mT, wanted)
                losses.append(loss)
                if trains:
                    parts.append(gradient @ head * (wanted != IGNORE_INDEX).unsqueeze(-1))
                if keeps:
                    kept.append(gradient)
                del gradient  # before the next chunk
        ctx.state_dtype, ctx.weight_dtype = states.dtype, weight.dtype
        ctx.loss_and_gradient, ctx.chunk = loss_and_gradient, chunk
        saved = (inputs, head, targets) if head_trains else (None, None, None)
        ctx.save_for_backward(torch.cat(parts, 1) if trains else None, *saved, *kept)
        return torch.cat(losses, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        gradients, inputs, head, targets, *kept = ctx.saved_tensors
        of_states = (
            None if gradients is None else (gradients * grad.unsqueeze(-1).to(gradients.dtype)).to(ctx.state_dtype)
        )
        if head is None:
            return of_states, None, None
        of_head, start = None, 0
        for place, (rows, wanted) in enumerate(_chunks(inputs, head, targets, ctx.chunk)):
            gradient = kept[place] if kept else ctx.loss_and_gradient(rows @ head.mT, wanted)[1]
            factors = grad[:, start : start + rows.shape[1]] * (wanted != IGNORE_INDEX)
            # The factors scale the states and not the logits' gradient, which is much larger.
            part = gradient.mT @ (rows * factors.unsqueeze(-1)).to(rows.dtype)
            of_head = upcast(part) if of_head is None else of_head.add_(part)  # a sum over many chunks
            start += rows.shape[1]
        assert of_head is not None
        return of_states, of_head.to(ctx.weight_dtype), None


def _chunks(
    inputs: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, chunk: int
) -> zip[tuple[torch.Tensor, torch.Tensor]]:
    """Yield states and targets of equally many tokens, with at most `chunk` logits."""
    tokens = inputs.shape[1]
    count = -(-tokens * head.shape[0] * head.shape[1] // chunk)
    size = -(-tokens // count)
    return zip(inputs.split(size, 1), targets.split(size, 1), strict=True)


def _loss_and_gradient() -> tuple[Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]], int]:
    """Return `_token_losses`, compiled where layers are, and the number of logits of a chunk."""
    compiler = layer_compiler()
    return (_token_losses, CHUNK) if compiler is None else (compiler(_token_losses), COMPILED_CHUNK)


def _token_losses(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token (..., token), and its gradient by the logits.

    A token with IGNORE_INDEX has loss 0, but a gradient.
    """
    index = targets.clamp(min=0).unsqueeze(-1)
    log_shares = torch.nn.functional.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    losses = -log_shares.gather(-1, index).squeeze(-1) * (targets != IGNORE_INDEX)
    if torch.compiler.is_compiling():  # a comparison needs no memory of its own
        classes = torch.arange(logits.shape[-1], device=logits.device)
        return losses, (log_shares.exp() - (classes == index).to(log_shares)).to(logits.dtype)
    shares = log_shares.exp_()
    return losses, shares.scatter_(-1, index, shares.gather(-1, index) - 1).to(logits.dtype)
