"""Attention that runs at the speed of the fused kernel under torch.vmap over clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.library import define, impl, register_vmap
from torch.nn import functional

from partita.core.torch_private import is_gradtrackingtensor
from partita.models.dropout import attention_factors

NAME = "partita"
ALIGNMENT = {"cuda": 8}  # half-precision matmuls are slow on CUDA unless the row length is a multiple of 8
# Up to this many tokens, compiled matmuls, and in bfloat16 on a CPU any, are faster than a fused kernel.
SHORT = {"cpu": 256, "cuda": 96}

# Replaces `scaled_dot_product` in a layer. The first argument is the layer's attention module.
AttentionHook = Callable[..., torch.Tensor]
_hook: ContextVar[AttentionHook | None] = ContextVar("attention_hook", default=None)


@contextmanager
def attention_hook(hook: AttentionHook) -> Iterator[None]:
    """Compute attention with `hook` inside the block."""
    before = _hook.set(hook)
    try:
        yield
    finally:
        _hook.reset(before)


def scaled_dot_product(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    causal: bool = False,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute softmax(query keyᵀ · scale) value.

    Args:
        query: (example, head, token, width).
        key: (example, head, token, width). May have fewer heads than the query (grouped-query attention).
        value: Like `key`.
        mask: Boolean, true where a token attends; or a float mask that is added to the scores.
        scale: Factor of the scores. Default: 1 / sqrt(width).
        causal: Whether a token attends only to itself and earlier tokens. Requires `mask` to be None.
        softcap: If set, scores are softcap · tanh(score / softcap), as in Gemma 2.
        sinks: If set, (head,), the score of one more token with value zero, as in gpt-oss.

    Returns:
        (example, head, token, width).
    """
    if softcap is not None or sinks is not None:  # no fused kernel has them
        return _unfused(query, key, value, mask, scale, causal, softcap, sinks)
    # The operator also takes matmuls out of vmap, under which the compiler has none for sizes that change.
    fused = not (torch.compiler.is_compiling() and _is_short(key))
    return _attend(query, key, value, mask, scale, causal, fused)


def _is_short(key: torch.Tensor) -> bool:
    return bool(key.shape[2] <= SHORT.get(key.device.type, 0))


def _one_block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    fused: bool,
) -> torch.Tensor:
    """`scaled_dot_product` outside vmap over clients."""
    if not fused:
        return _unfused(query, key, value, mask, scale, causal)
    tensors = [tensor for tensor in (query, key, value, mask) if tensor is not None]
    if any(map(is_gradtrackingtensor, tensors)):  # torch.func.grad: the fused backward has no batching rule
        return _unfused(query, key, value, mask, scale, causal)
    if query.requires_grad and query.device.type == "cpu" and query.dtype == torch.bfloat16 and _is_short(key):
        return _unfused(query, key, value, mask, scale, causal)
    if mask is not None and mask.requires_grad:  # a bias that trains: not every fused kernel has its gradient
        return _unfused(query, key, value, mask, scale, causal)
    if mask is not None:  # no fused CUDA kernel supports both a mask and grouped-query attention
        key, value = for_each_head(query, key, value)
    grouped = bool(query.shape[1] != key.shape[1])
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def _fold_clients(
    info: Any,
    dims: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    fused: bool,
) -> tuple[torch.Tensor, int]:
    """Under vmap, fold clients into the example dimension of one fused call. Plain vmap would loop over clients."""
    clients = info.batch_size

    def clients_first(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:  # (client, example, ...)
        return tensor.expand(clients, *tensor.shape) if dim is None else tensor.movedim(dim, 0)

    query, key, value = (clients_first(tensor, dims[i]).flatten(0, 1) for i, tensor in enumerate((query, key, value)))
    examples = query.shape[0] // clients
    if mask is not None:
        mask = clients_first(mask, dims[3])  # the example dimension may be 1
        mask = mask.expand(clients, examples, *mask.shape[2:]).flatten(0, 1)
    output = _attend(query, key, value, mask, scale, causal, fused)
    return output.reshape(clients, examples, *output.shape[1:]), 0


# An operator, because the compiler can follow its rule for vmap. Autograd sees the fused call itself.
define(
    "partita::attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, float? scale, bool causal, bool fused) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
impl("partita::attention", "CompositeImplicitAutograd")(_one_block)
register_vmap("partita::attention", _fold_clients)
_attend: Callable[..., torch.Tensor] = torch.ops.partita.attention.default


def for_each_head(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat key and value heads so that each query head has its own."""
    group_size = query.shape[1] // key.shape[1]
    if group_size == 1:
        return key, value
    key, value = (part[:, :, None].expand(-1, -1, group_size, -1, -1).flatten(1, 2) for part in (key, value))
    return key, value


def _unfused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """`scaled_dot_product` as matrix products. The probabilities are multiplied by `factors`, if given."""
    key, value = for_each_head(query, key, value)
    if causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if padding := -key.shape[2] % ALIGNMENT.get(query.device.type, 1):
        full_mask = query.new_ones(1, key.shape[2], dtype=torch.bool) if mask is None else mask
        mask = functional.pad(full_mask, (0, padding), value=False if full_mask.dtype == torch.bool else -torch.inf)
        key, value = (functional.pad(part, (0, 0, 0, padding)) for part in (key, value))
        factors = None if factors is None else functional.pad(factors, (0, padding))
    found = probabilities(query, key, mask, scale, softcap, sinks)
    return (found if factors is None else found * factors) @ value


def probabilities(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute softmax(query keyᵀ · scale), (example, head, query, key).

    Args:
        query: (example, head, query, width).
        key: (example, head, key, width), with as many heads as the query.
        mask: Boolean, true where a token attends; or a float mask that is added to the scores.
        scale: Factor of the scores. Default: 1 / sqrt(width).
        softcap: As in `scaled_dot_product`.
        sinks: As in `scaled_dot_product`.
    """
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if mask is not None and mask.dtype == torch.bool:
        # Not -inf: an example with only padding would become NaN.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return scores.softmax(-1)


def _add_bias(
    bias: torch.Tensor, mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, causal: bool
) -> torch.Tensor:
    """Add a position bias (1 or example, head, query, key) to a mask, which may be missing, Boolean or float."""
    if causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if mask is None:
        return bias
    return bias.masked_fill(~mask, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask


def layer_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls in each layer."""
    if attention_mask is not None and attention_mask.numel() == 0:  # from `causal_only`
        attention_mask = None
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    causal = causal and attention_mask is None and query.shape[2] > 1  # a mask already includes causality
    if position_bias is not None:
        attention_mask, causal = _add_bias(position_bias, attention_mask, query, key, causal), False
    modified: dict[str, Any] = {} if softcap is None and s_aux is None else {"softcap": softcap, "sinks": s_aux}
    hook = None if torch.compiler.is_compiling() else _hook.get()  # hooks are never used in compiled code
    factors = attention_factors(module, dropout, query, key.shape[2]) if dropout else None
    if factors is not None:
        out = _unfused(query, key, value, attention_mask, scaling, causal, softcap, s_aux, factors)
    elif hook is None:
        out = scaled_dot_product(query, key, value, attention_mask, scaling, causal, **modified)
    else:
        out = hook(module, query, key, value, attention_mask, scaling, causal, **modified)
    return out.transpose(1, 2), None  # (example, token, head, width)


def causal_only(states: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """Return what to pass to a decoder as the attention mask of texts without padding.

    Without a mask, transformers compares positions to find texts that were packed into one. It waits for the GPU to do
    so, and in a CUDA graph it builds a mask, with which attention is slower. An empty mask is passed on as it is.

    Args:
        states: The embeddings, (example, token, width).
        window: The decoder's sliding window; None if it has none.

    Returns:
        An empty mask, which `layer_attention` reads as plain causal attention; None if the window needs a mask.
    """
    if window is not None and window < states.shape[1]:
        return None
    return states.new_empty(1, 1, 0, 0, dtype=torch.bool)
