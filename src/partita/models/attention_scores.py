"""Where attention goes: what each layer and head pays to chosen tokens, without ever holding a map of attention.

    score of layer l, head h = mean over tokens i of  sum over tokens j in T of  attention[l, h, i, j]

With the indicator of T as one more column of the values, the fused kernel returns the inner sum for every token i, in
memory that grows with the tokens and not with their square. The mean over an example's heads and seen tokens is the
published sum over both, divided by heads x tokens: padding and length do not score.
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

SEEN = "attention_mask"
EIGHT = 8  # fused kernels take widths that are a multiple of it
TOKENS = ("auto", "cls", "entities", "content")
DEGENERATE = {
    "all": "attention to all tokens is 1 in every layer, by softmax",
    "last": "of a decoder's tokens only the last one sees the last, and of an encoder's it is one like any other",
    "first": "in a decoder it is where attention goes that has nowhere to go; in an encoder it is called 'cls'",
    "bos": "in a decoder it is where attention goes that has nowhere to go; in an encoder it is called 'cls'",
}


@torch.no_grad()
def attention_to(model: FunctionalModel, params: Tensors, batch: Batch, tokens: str) -> dict[str, Tensor]:
    """By layer, (example, head), in one forward pass.

    Layers that are cached for good are not run, and not scored. Of a CLIP with two towers, the image's is scored.
    """
    seen, inputs = batch.inputs.get(SEEN), batch.inputs
    if seen is not None and bool(seen.all()):  # without a mask the fused kernels need no square of the tokens
        seen, inputs = None, {name: value for name, value in inputs.items() if name != SEEN}
    watch = _Scores(model, batch, resolve_tokens(model, tokens), seen, _layers(model))
    with attention_hook(watch):
        model(params, inputs)
    return watch.found


def resolve_tokens(model: FunctionalModel, tokens: str) -> str:
    """Which tokens are meant; those that would tell nothing of a layer are refused."""
    decodes = _decodes(model)
    if tokens in DEGENERATE:
        raise ModelError(f"tokens = '{tokens}' tells no layer from another: {DEGENERATE[tokens]}; {_remedy(model)}")
    if tokens not in TOKENS:
        raise ModelError(f"tokens is '{tokens}'; {closest_match(tokens, TOKENS)}")
    if tokens == "cls" and decodes:
        raise ModelError(f"tokens = 'cls' is for encoders, and {model.name} decodes; {_remedy(model)}")
    if tokens == "entities" and model.objective != "tokens":
        raise ModelError(f"tokens = 'entities' is for tasks that tag tokens; {_remedy(model)}")
    if tokens != "auto":
        return tokens
    return "entities" if model.objective == "tokens" else "content" if decodes else "cls"


@dataclass(frozen=True, eq=False)
class _Scores:
    """Computes attention as ever, and beside it each layer's score."""

    model: FunctionalModel
    batch: Batch
    tokens: str
    seen: Tensor | None  # (example, token)
    layers: dict[nn.Module, str]
    found: dict[str, Tensor] = field(default_factory=dict)

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
        room = (0, EIGHT - width % EIGHT)
        marked = _marked(self.model, self.batch, self.tokens, self.seen, key.shape[2]).to(value)
        value = functional.pad(value, room)
        value[..., width] = marked[:, None]  # (example, head, token)
        # Query and key are as wide as the value, or no fused kernel takes them; zeros add nothing to their product.
        query, key = functional.pad(query, room), functional.pad(key, room)
        out = scaled_dot_product(query, key, value, mask, width**-0.5 if scale is None else scale, causal)
        paid = out[..., width].float()  # (example, head, token)
        if self.seen is None:
            self.found[self.layers[module]] = paid.mean(-1)
        else:
            seen = self.seen[:, None].to(paid)  # (example, 1, token)
            self.found[self.layers[module]] = (paid * seen).sum(-1) / seen.sum(-1).clamp(min=1)
        return out[..., :width]


def _layers(model: FunctionalModel) -> dict[nn.Module, str]:
    """Modules within layers, by which a call of attention is known; each layer has one such call."""
    found = {}
    for path, part in model.module.named_modules():
        if not path.startswith("text_model.") and (number := re.search(r"\.(\d+)\.", path)):
            found[part] = f"layer.{number[1]}"
    return found


def _marked(model: FunctionalModel, batch: Batch, tokens: str, seen: Tensor | None, count: int) -> Tensor:
    """(example, token), true for the tokens meant; one row may stand for all."""
    device = batch.targets.device
    if tokens == "entities":
        return (batch.targets != IGNORE_INDEX) & (batch.targets != _outside(model))
    valid = torch.ones(1, count, device=device).bool() if seen is None else seen.bool()
    rank = valid.cumsum(1)  # 1 at the first token that is no padding
    if tokens == "cls":
        return valid & (rank == 1)
    if "pixel_values" in batch.inputs:
        return rank > count - _patches(model, batch.inputs["pixel_values"])
    if not _decodes(model):  # a tokenizer of an encoder puts one special token first and one last
        return valid & (rank > 1) & (rank < rank[:, -1:])
    if "input_ids" not in batch.inputs:
        raise ModelError("tokens = 'content' needs the tokens, which are not there; set engine.cache_frozen = false")
    config, special = model.module.config, []
    for token in (config.bos_token_id, config.eos_token_id, config.pad_token_id):
        special += token if isinstance(token, list) else [] if token is None else [token]
    ids = batch.inputs["input_ids"]
    return valid & (rank > 1) & ~torch.isin(ids, torch.tensor(special, device=device, dtype=ids.dtype))


def _outside(model: FunctionalModel) -> int:
    """The class of tokens that are of no entity."""
    labels: Any = model.module.config.label2id
    if "O" not in labels:
        raise ModelError(
            f"tokens = 'entities' means those of another class than 'O', and {model.name} has no such class, only: "
            f"{', '.join(labels)}; use BIO tags, or set tokens = 'content'"
        )
    return int(labels["O"])


def _patches(model: FunctionalModel, pixels: Tensor) -> int:
    config: Any = model.module.config
    patch = getattr(config, "vision_config", config).patch_size
    return (pixels.shape[-2] // patch) * (pixels.shape[-1] // patch)


def _decodes(model: FunctionalModel) -> bool:
    return "lm" in architecture(str(model.module.config.model_type)).heads


def _remedy(model: FunctionalModel) -> str:
    able = [word for word in TOKENS[1:] if word != ("cls" if _decodes(model) else "")]
    fit = [word for word in able if word != "entities" or model.objective == "tokens"]
    return f"set it to 'auto', {' or '.join(repr(word) for word in fit)}"


def head_dimensions(model: FunctionalModel) -> dict[str, tuple[int, int]]:
    """The projections and their biases. Low-rank factors are left out: of two, one is whole for every head."""
    config: Any = model.module.config
    config = getattr(config, "vision_config", config)
    heads = int(config.num_attention_heads)
    shared = int(getattr(config, "num_key_value_heads", None) or heads)
    transposed = architecture(str(model.module.config.model_type)).transposed
    found = {}
    for name, tags in model.tags.items():
        role, matrix = role_tag(tags - {"lora"}), model.initial[name].ndim == 2
        if "lora" in tags or "text" in tags or role not in ("query", "key", "value", "output"):
            continue
        if role == "output":
            if matrix:
                found[name] = (0 if transposed else 1, heads)
        elif matrix or name.endswith(".bias"):  # a norm of queries or keys is one for all heads
            found[name] = (int(matrix and transposed), heads if role == "query" else shared)
    return found
