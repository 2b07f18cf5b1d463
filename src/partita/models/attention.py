"""Attention that torch.vmap can lift over clients at the speed of the fused kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor, is_gradtrackingtensor  # torch has no public name for these
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from partita.models import ModelError

NAME = "partita"
ALIGNMENT = {"cuda": 8}  # products in half precision are slow there where a row's length is no multiple of it
SHORT = 256  # tokens, up to which a CPU's fused backward pass in bfloat16 takes longer than products of matrices
REFUSED = ("softcap", "position_bias", "s_aux")  # changes to the scores that other architectures ask for

# What computes a layer's attention in the place of `attend`, given the layer's module as well.
AttentionHook = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor | None, float | None, bool], Tensor]
_watch: ContextVar[AttentionHook | None] = ContextVar("watch", default=None)


@contextmanager
def attention_hook(watch: AttentionHook) -> Iterator[None]:
    before = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(before)


def scaled_dot_product(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, causal: bool = False
) -> Tensor:
    """softmax(query keyᵀ · scale) value, each (example, head, token, width); a Boolean mask is true where to look.

    Several heads of the query may share one of key and value. Causal: a token looks at none after it; without a mask.
    """
    if torch.compiler.is_compiling():  # the compiler fuses it, and cannot see which transforms are at work
        return _unfused(query, key, value, mask, scale, causal)
    tensors = [tensor for tensor in (query, key, value, mask) if tensor is not None]
    if any(map(is_batchedtensor, tensors)):
        return _FoldClients.apply(query, key, value, mask, scale, causal)
    if any(map(is_gradtrackingtensor, tensors)):  # torch.func.grad: the fused backward pass has no batching rule
        return _unfused(query, key, value, mask, scale, causal)
    if query.requires_grad and query.device.type == "cpu" and query.dtype == torch.bfloat16 and key.shape[2] <= SHORT:
        return _unfused(query, key, value, mask, scale, causal)
    if mask is not None:  # no fused kernel of CUDA takes both a mask and shared heads
        key, value = _for_each_head(query, key, value)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


class _FoldClients(torch.autograd.Function):
    """Under vmap, clients become more examples of one fused call; by itself vmap would call it for each client."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, causal: bool
    ) -> Tensor:
        raise AssertionError("only ever called under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to save: autograd sees the fused call itself."""

    @staticmethod
    def vmap(
        info: Any,
        dims: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float | None,
        causal: bool,
    ) -> tuple[Tensor, int]:
        clients = info.batch_size

        def front(tensor: Tensor, dim: int | None) -> Tensor:  # (client, example, ...)
            return tensor.expand(clients, *tensor.shape) if dim is None else tensor.movedim(dim, 0)

        query, key, value = (front(tensor, dims[i]).flatten(0, 1) for i, tensor in enumerate((query, key, value)))
        examples = len(query) // clients
        if mask is not None:
            mask = front(mask, dims[3])  # one row may serve all examples
            mask = mask.expand(clients, examples, *mask.shape[2:]).flatten(0, 1)
        output = scaled_dot_product(query, key, value, mask, scale, causal)
        return output.reshape(clients, examples, *output.shape[1:]), 0


def _for_each_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value repeated where several heads of the query share one."""
    sharing = query.shape[1] // key.shape[1]
    if sharing == 1:
        return key, value
    key, value = (part[:, :, None].expand(-1, -1, sharing, -1, -1).flatten(1, 2) for part in (key, value))
    return key, value


def _unfused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, causal: bool
) -> Tensor:
    key, value = _for_each_head(query, key, value)
    if causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if spare := -key.shape[2] % ALIGNMENT.get(query.device.type, 1):
        whole = query.new_ones(1, key.shape[2], dtype=torch.bool) if mask is None else mask
        mask = functional.pad(whole, (0, spare), value=False if whole.dtype == torch.bool else -torch.inf)
        key, value = (functional.pad(part, (0, 0, 0, spare)) for part in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None and mask.dtype == torch.bool:
        # Not -inf: an example that is all padding must not turn into NaN.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ value


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer."""
    if dropout:
        raise ModelError(
            f"{type(module).__name__} asks for attention dropout {dropout}, which draws from global random state; "
            "put the module in eval mode"
        )
    if asked := [name for name in REFUSED if others.get(name) is not None]:
        raise ModelError(f"{type(module).__name__} asks for {asked[0]}, which {NAME} attention does not compute")
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    causal = causal and attention_mask is None and query.shape[2] > 1  # a mask has it in it
    watch = None if torch.compiler.is_compiling() else _watch.get()  # nobody watches what is compiled
    if watch is None:
        out = scaled_dot_product(query, key, value, attention_mask, scaling, causal)
    else:
        out = watch(module, query, key, value, attention_mask, scaling, causal)
    return out.transpose(1, 2), None  # (example, token, head, width)


def _mask(
    *,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **facts: Any,
) -> Tensor | None:
    """A Boolean mask (example, 1, query, key), or None where all see all, or all that came before.

    Without padding to mark, lengths decide which: here, since some versions of transformers make a mask all the same
    while a step is recorded or compiled, and fused kernels are slower with one, or cannot take it. Its values are never
    looked at, for vmap's sake.
    """
    told_by_lengths = allow_is_bidirectional_skip or (allow_is_causal_skip and q_length in (1, kv_length))
    if told_by_lengths and attention_mask is None and (local_size is None or kv_length < local_size):
        return None
    return sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **facts,
    )


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
