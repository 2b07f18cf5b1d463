"""Text decoders: GPT-2, LLaMA and similar models (SmolLM, Mistral, Qwen). Features are those of the last token."""

from __future__ import annotations

from typing import Any

import torch

from partita.core.model import HeadOutput, Output
from partita.core.tensors import Tensors
from partita.models.architectures.spec import Architecture, InputSide, head_dropout, tag_rules
from partita.models.attention import causal_only
from partita.models.vmap_layers import Linear


def _state(module: Any, inputs: Tensors) -> torch.Tensor:
    """Return the last hidden states, (example, token, width)."""
    others: dict[str, Any] = dict(inputs)
    segments = others.pop("segment_ids", None)
    if segments is not None:
        others["attention_mask"] = within_segments(segments)
    body = module.base_model
    # Embed here: GPT-2 would search the token ids for padding, and vmap cannot branch on values.
    embedded = body.get_input_embeddings()(others.pop("input_ids"))
    if others.keys().isdisjoint(("attention_mask", "position_ids")):
        others["attention_mask"] = causal_only(embedded, getattr(module.config, "sliding_window", None))
    state: torch.Tensor = body(inputs_embeds=embedded, use_cache=False, **others).last_hidden_state
    return state


def within_segments(segments: torch.Tensor) -> torch.Tensor:
    """Return the mask of packed rows, (example, 1, query, key).

    A token attends to itself and to earlier tokens of its segment. Padding is a segment too, so that no token attends
    to nothing.

    Args:
        segments: The segment of each token, (example, token).
    """
    same = segments.unsqueeze(-1) == segments.unsqueeze(-2)
    return same.tril().unsqueeze(-3)


def last_token(state: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    """Return the state of the last token that is not padding, (example, width). Padding may be on either side."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return state[:, -1]
    place = (mask.long() * torch.arange(mask.shape[1], device=mask.device)).argmax(1)  # (example,)
    return state.gather(1, place[:, None, None].expand(-1, 1, state.shape[-1])).squeeze(1)


def _classes(module: Any, inputs: Tensors) -> Output:
    features = last_token(_state(module, inputs), inputs)
    return Output(module.score(features), features)


def _tokens(module: Any, inputs: Tensors) -> Output:
    state = _state(module, inputs)
    head = module.classifier if hasattr(module, "classifier") else module.score
    return Output(head(head_dropout(module, state)), last_token(state, inputs))


def _next(module: Any, inputs: Tensors) -> Output:
    state = _state(module, inputs)
    head, features = module.lm_head, last_token(state, inputs)
    if type(head) is Linear and head.bias is None:
        return HeadOutput(state, head.weight, features)
    return Output(head(state), features)


GPT2 = Architecture(
    roles=(
        (r"transformer\.w[tp]e\..+", "embedding"),
        *tag_rules(
            r"transformer\.h\.(?P<layer>\d+)\.",
            {
                r"attn\.c_attn\.query\..+": "query",
                r"attn\.c_attn\.key\..+": "key",
                r"attn\.c_attn\.value\..+": "value",
                r"attn\.c_proj\..+": "output",
                r"mlp\..+": "mlp",
                r"ln_[12]\..+": "norm",
            },
        ),
        (r"transformer\.ln_f\..+", "norm"),
        (r"(score|classifier|lm_head)\..+", "head"),
    ),
    heads={"text": _classes, "tokens": _tokens, "lm": _next},
    transposed=True,
    start=InputSide("input_ids", ("wte", "wpe"), "h"),
    packs=True,
)

LLAMA = Architecture(
    roles=(
        (r"model\.embed_tokens\..+", "embedding"),
        *tag_rules(
            r"model\.layers\.(?P<layer>\d+)\.",
            {
                # Qwen3's query and key norms act on the attention scores directly, unlike all other norms in a layer.
                # So they are frozen with the attention kernel.
                r"self_attn\.q_(proj|norm)\..+": "query",
                r"self_attn\.k_(proj|norm)\..+": "key",
                r"self_attn\.v_proj\..+": "value",
                r"self_attn\.o_proj\..+": "output",
                r"mlp\..+": "mlp",
                r"(input|post_attention)_layernorm\..+": "norm",
            },
        ),
        (r"model\.norm\..+", "norm"),
        (r"(score|lm_head)\..+", "head"),
    ),
    heads={"text": _classes, "tokens": _tokens, "lm": _next},
    start=InputSide("input_ids", ("embed_tokens",), "layers"),
    packs=True,
)
