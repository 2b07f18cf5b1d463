"""Attention scores: how much each layer and head attends to chosen tokens, without materializing attention maps.

    score of layer l, head h = mean over tokens i of  sum over tokens j in T of  attention[l, h, i, j]

The indicator of T is appended to the values as one more column. The fused kernel then returns the inner sum for every
token i, in memory linear in the number of tokens. The mean over an example's heads and unmasked tokens is the published
sum over both, divided by heads x tokens: padding and sequence length do not change the score.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from partita.core.data import IGNORE_INDEX, Batch
from partita.core.model import role_tag
from partita.core.options import closest_match
from partita.core.tensors import Tensors
from partita.models import ModelError
from partita.models.adapter import FunctionalModel
from partita.models.architectures import architecture
from partita.models.attention import attention_hook, scaled_dot_product

ATTENTION_MASK = "attention_mask"
KERNEL_WIDTH = 8  # fused kernels need widths that are a multiple of 8
TOKENS = ("auto", "cls", "entities", "content")
DEGENERATE = {
    "all": "softmax makes attention to all tokens 1 in every layer",
    "last": "in a decoder only the last token attends to the last token; in an encoder it is a token like any other",
    "first": "in a decoder it is an attention sink; in an encoder it is called 'cls'",
    "bos": "in a decoder it is an attention sink; in an encoder it is called 'cls'",
}


@torch.no_grad()
def attention_to(model: FunctionalModel, params: Tensors, batch: Batch, tokens: str) -> dict[str, Tensor]:
    """Compute attention scores in one forward pass.

    Layers replaced by the frozen cache are not run and have no score. In a CLIP with two towers, the image tower is
    scored.

    Args:
        model: Model to score.
        params: Parameters of the model.
        batch: Examples.
        tokens: Tokens whose received attention is measured; see `resolve_tokens`.

    Returns:
        For each layer tag, the scores (example, head).
    """
    attention_mask, inputs = batch.inputs.get(ATTENTION_MASK), batch.inputs
    # Without a mask, fused kernels need only linear memory.
    if attention_mask is not None and bool(attention_mask.all()):
        attention_mask, inputs = None, {name: value for name, value in inputs.items() if name != ATTENTION_MASK}
    hook = _Scores(model, batch, resolve_tokens(model, tokens), attention_mask, _layers(model))
    with attention_hook(hook):
        model(params, inputs)
    return hook.scores


def resolve_tokens(model: FunctionalModel, tokens: str) -> str:
    """Resolve "auto" to a choice of tokens that fits the model.

    Raises:
        ModelError: If the choice is unknown, does not fit the model, or gives the same score in every layer.
    """
    is_decoder = _is_decoder(model)
    if tokens in DEGENERATE:
        raise ModelError(f"tokens = '{tokens}' does not distinguish layers: {DEGENERATE[tokens]}; {_remedy(model)}")
    if tokens not in TOKENS:
        raise ModelError(f"tokens is '{tokens}'; {closest_match(tokens, TOKENS)}")
    if tokens == "cls" and is_decoder:
        raise ModelError(f"tokens = 'cls' is for encoders, but {model.name} is a decoder; {_remedy(model)}")
    if tokens == "entities" and model.kind.head != "tokens":
        raise ModelError(f"tokens = 'entities' is for token classification tasks; {_remedy(model)}")
    if tokens != "auto":
        return tokens
    return "entities" if model.kind.head == "tokens" else "content" if is_decoder else "cls"


@dataclass(frozen=True, eq=False)
class _Scores:
    """An attention hook that computes the usual output and stores each layer's score."""

    model: FunctionalModel
    batch: Batch
    tokens: str
    attention_mask: Tensor | None  # (example, token)
    layers: dict[nn.Module, str]
    scores: dict[str, Tensor] = field(default_factory=dict)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float | None,
        causal: bool,
    ) -> Tensor:
        if module not in self.layers:
            return scaled_dot_product(query, key, value, mask, scale, causal)
        width = value.shape[-1]
        padding = (0, KERNEL_WIDTH - width % KERNEL_WIDTH)
        chosen = _chosen_tokens(self.model, self.batch, self.tokens, self.attention_mask, key.shape[2]).to(value)
        value = functional.pad(value, padding)
        value[..., width] = chosen[:, None]  # (example, head, token)
        # Fused kernels need query and key as wide as the value. Zero padding does not change their product.
        query, key = functional.pad(query, padding), functional.pad(key, padding)
        out = scaled_dot_product(query, key, value, mask, width**-0.5 if scale is None else scale, causal)
        received = out[..., width].float()  # (example, head, token)
        if self.attention_mask is None:
            self.scores[self.layers[module]] = received.mean(-1)
        else:
            attention_mask = self.attention_mask[:, None].to(received)  # (example, 1, token)
            self.scores[self.layers[module]] = (received * attention_mask).sum(-1) / attention_mask.sum(-1).clamp(min=1)
        return out[..., :width]


def _layers(model: FunctionalModel) -> dict[nn.Module, str]:
    """Map the modules inside layers to layer tags. Each layer makes one attention call, from one of these modules."""
    layers = {}
    for path, part in model.module.named_modules():
        if not path.startswith("text_model.") and (number := re.search(r"\.(\d+)\.", path)):
            layers[part] = f"layer.{number[1]}"
    return layers


def _chosen_tokens(
    model: FunctionalModel, batch: Batch, tokens: str, attention_mask: Tensor | None, count: int
) -> Tensor:
    """Return a mask of the chosen tokens, (example, token); one row may stand for all examples."""
    device = batch.targets.device
    if tokens == "entities":
        return (batch.targets != IGNORE_INDEX) & (batch.targets != _outside(model))
    valid = torch.ones(1, count, device=device).bool() if attention_mask is None else attention_mask.bool()
    rank = valid.cumsum(1)  # 1 at the first token that is not padding
    if tokens == "cls":
        return valid & (rank == 1)
    if "pixel_values" in batch.inputs:
        return rank > count - _patches(model, batch.inputs["pixel_values"])
    if not _is_decoder(model):  # encoder tokenizers add one special token at each end
        return valid & (rank > 1) & (rank < rank[:, -1:])
    if "input_ids" not in batch.inputs:
        raise ModelError("tokens = 'content' needs token ids, which are not cached; set engine.cache_frozen = false")
    config, special = model.module.config, []
    for token in (config.bos_token_id, config.eos_token_id, config.pad_token_id):
        special += token if isinstance(token, list) else [] if token is None else [token]
    ids = batch.inputs["input_ids"]
    return valid & (rank > 1) & ~torch.isin(ids, torch.tensor(special, device=device, dtype=ids.dtype))


def _outside(model: FunctionalModel) -> int:
    """Return the index of class "O", the class of tokens outside entities."""
    labels: Any = model.module.config.label2id
    if "O" not in labels:
        raise ModelError(
            f"tokens = 'entities' needs a class 'O' for tokens outside entities, but {model.name} has only: "
            f"{', '.join(labels)}; use BIO tags, or set tokens = 'content'"
        )
    return int(labels["O"])


def _patches(model: FunctionalModel, pixels: Tensor) -> int:
    config: Any = model.module.config
    patch = getattr(config, "vision_config", config).patch_size
    return (pixels.shape[-2] // patch) * (pixels.shape[-1] // patch)


def _is_decoder(model: FunctionalModel) -> bool:
    return "lm" in architecture(str(model.module.config.model_type)).heads


def _remedy(model: FunctionalModel) -> str:
    supported = [word for word in TOKENS[1:] if word != ("cls" if _is_decoder(model) else "")]
    fit = [word for word in supported if word != "entities" or model.kind.head == "tokens"]
    return f"set it to 'auto', {' or '.join(repr(word) for word in fit)}"


def head_dimensions(model: FunctionalModel) -> dict[str, tuple[int, int]]:
    """Find the parameters that are divided into attention heads.

    These are the attention projections and their biases. Low-rank factors are excluded, because one factor of each pair
    is shared by all heads.

    Returns:
        For each parameter name, the dimension that is divided and the number of heads.
    """
    config: Any = model.module.config
    config = getattr(config, "vision_config", config)
    heads = int(config.num_attention_heads)
    shared = int(getattr(config, "num_key_value_heads", None) or heads)
    transposed = architecture(str(model.module.config.model_type)).transposed
    dimensions = {}
    for name, tags in model.tags.items():
        role, matrix = role_tag(tags - {"lora"}), model.initial[name].ndim == 2
        if "lora" in tags or "text" in tags or role not in ("query", "key", "value", "output"):
            continue
        if role == "output":
            if matrix:
                dimensions[name] = (0 if transposed else 1, heads)
        elif matrix or name.endswith(".bias"):  # a norm of queries or keys is one for all heads
            dimensions[name] = (int(matrix and transposed), heads if role == "query" else shared)
    return dimensions
