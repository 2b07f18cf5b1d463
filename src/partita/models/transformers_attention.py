"""Let the models of transformers compute attention with `attention.layer_attention`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from partita.models import attention
from partita.models.functional import without_logs


def use_attention(module: PreTrainedModel) -> None:
    """Replace the attention of a module. One whose attention cannot be replaced keeps its own."""
    with without_logs():
        module.set_attn_implementation(attention.NAME)


def _mask(
    *,
    q_length: int,
    kv_length: int,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> torch.Tensor | None:
    """Return a Boolean mask (example, 1, query, key), or None for full attention or plain causal attention.

    Without padding, the lengths decide whether a mask is needed. They are checked here because some versions of
    transformers build a mask anyway during CUDA graph capture and compilation, and fused kernels are slower with a mask
    or do not support it. The values of the mask are never read, because vmap cannot branch on them.
    """
    skip_by_lengths = allow_is_bidirectional_skip or (allow_is_causal_skip and q_length in (1, kv_length))
    if skip_by_lengths and attention_mask is None and (local_size is None or kv_length < local_size):
        return None
    return sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **options,
    )


AttentionInterface.register(attention.NAME, attention.layer_attention)
AttentionMaskInterface.register(attention.NAME, _mask)
