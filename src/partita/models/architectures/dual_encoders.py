"""Dual encoders: an image tower and a text tower, run layer by layer so that prompts can be inserted between layers.

CLIP, SigLIP and transformers' VisionTextDualEncoderModel use the same names for the towers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from partita.core.options import closest_match
from partita.models import ModelError
from partita.models.attention import scaled_dot_product

DUAL_ENCODERS = ("clip", "siglip", "vision-text-dual-encoder")


@dataclass(frozen=True)
class ImageTowerSpec:
    """How to run an image tower. States are (example, token, width).

    The first token represents the image, unless the tower has a function to `pool` all tokens.
    """

    first_states: Callable[[Any, torch.Tensor], torch.Tensor]  # from pixels to the input of the first layer
    layers: str  # path of the layers
    finish: Callable[[Any, torch.Tensor], torch.Tensor]  # applied to each token after the last layer
    layer_args: tuple[None, ...] = ()  # further positional arguments of a layer: CLIP's requires a mask, here None
    pool: Callable[[Any, torch.Tensor], torch.Tensor] | None = None  # from finished states to (example, width)

    @property
    def image_tokens(self) -> int:
        """The number of tokens before the patches that stand for the image."""
        return 0 if self.pool else 1


@dataclass(frozen=True)
class TextTowerSpec:
    """How to run a text tower. States are (text, token, width); `attention_mask` (text, token) is false for padding."""

    token_embedding: str  # path of the token embedding
    first_states: Callable[[Any, torch.Tensor], torch.Tensor]  # from embedded tokens to the input of the first layer
    layers: str  # path of the layers
    causal: bool  # whether tokens attend only to earlier tokens
    pool: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]  # states and attention mask -> (text, width)
    start_tokens: int = 1  # special tokens before a text
    full_length: bool = False  # whether texts are padded to the tower's length, and it attends to the padding


def _add_positions(tower: Any, states: torch.Tensor) -> torch.Tensor:
    positions: torch.Tensor = tower.embeddings.position_embedding.weight[: states.shape[1]]
    return states + positions


def _last_token(tower: Any, states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the state of the last token that is not padding, (text, width)."""
    # A product instead of indexing: it is deterministic on a GPU, also in the backward pass.
    positions = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    ends = positions == attention_mask.sum(1, keepdim=True) - 1  # (text, token)
    normalized: torch.Tensor = tower.final_layer_norm((states * ends.unsqueeze(-1)).sum(1))
    return normalized


def _pool_by_attention(tower: Any, states: torch.Tensor) -> torch.Tensor:
    """Attend to the image's tokens from a learned query, as SigLIP does, (example, width)."""
    head = tower.head
    attention = head.attention
    weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    inputs = (head.probe.expand(len(states), -1, -1), states, states)
    query, key, value = (
        torch.nn.functional.linear(part, weight, bias).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
        for part, weight, bias in zip(inputs, weights, biases, strict=True)
    )
    pooled = attention.out_proj(scaled_dot_product(query, key, value, None, None).transpose(1, 2).flatten(2))
    image: torch.Tensor = (pooled + head.mlp(head.layernorm(pooled)))[:, 0]
    return image


IMAGE_TOWERS = {
    "clip_vision_model": ImageTowerSpec(
        first_states=lambda tower, pixels: tower.pre_layrnorm(tower.embeddings(pixels)),
        layers="encoder.layers",
        finish=lambda tower, states: tower.post_layernorm(states),
        layer_args=(None,),
    ),
    **dict.fromkeys(
        ("dinov2", "dinov2_with_registers"),
        ImageTowerSpec(
            first_states=lambda tower, pixels: tower.embeddings(pixels),
            layers="encoder.layer",
            finish=lambda tower, states: tower.layernorm(states),
        ),
    ),
}

IMAGE_TOWERS["siglip_vision_model"] = ImageTowerSpec(
    first_states=lambda tower, pixels: tower.embeddings(pixels),
    layers="encoder.layers",
    finish=lambda tower, states: tower.post_layernorm(states),
    layer_args=(None,),
    pool=_pool_by_attention,
)

TEXT_TOWERS = {
    "clip_text_model": TextTowerSpec(
        token_embedding="embeddings.token_embedding",
        first_states=_add_positions,
        layers="encoder.layers",
        causal=True,
        pool=_last_token,
    ),
    "siglip_text_model": TextTowerSpec(
        token_embedding="embeddings.token_embedding",
        first_states=_add_positions,
        layers="encoder.layers",
        causal=False,
        pool=lambda tower, states, attention_mask: tower.head(tower.final_layer_norm(states[:, -1])),
        start_tokens=0,
        full_length=True,
    ),
    "bert": TextTowerSpec(
        token_embedding="embeddings.word_embeddings",
        first_states=lambda tower, states: tower.embeddings(inputs_embeds=states),
        layers="encoder.layer",
        causal=False,
        pool=lambda tower, states, attention_mask: tower.pooler(states),
    ),
}


def image_tower_spec(model_type: str) -> ImageTowerSpec:
    """Return the spec of an image tower.

    Raises:
        ModelError: If the model type is not supported.
    """
    if model_type not in IMAGE_TOWERS:
        raise ModelError(f"partita does not support prompts in the image tower '{model_type}'; {_known(IMAGE_TOWERS)}")
    return IMAGE_TOWERS[model_type]


def text_tower_spec(model_type: str) -> TextTowerSpec:
    """Return the spec of a text tower.

    Raises:
        ModelError: If the model type is not supported.
    """
    if model_type not in TEXT_TOWERS:
        raise ModelError(f"partita does not support prompts in the text tower '{model_type}'; {_known(TEXT_TOWERS)}")
    return TEXT_TOWERS[model_type]


def full_length(config: Any) -> int | None:
    """Return the number of tokens to which a text tower's texts are padded; None for the longest of a batch."""
    return int(config.max_position_embeddings) if text_tower_spec(str(config.model_type)).full_length else None


def check_dual_encoder(path: str, model_type: str) -> None:
    """Raise a ModelError that names `path` if its model type is not a supported dual encoder."""
    if model_type not in DUAL_ENCODERS:
        raise ModelError(
            f"'{path}' is a '{model_type}', which is not a pair of an image tower and a text tower; "
            f"{closest_match(model_type, DUAL_ENCODERS)}"
        )


def _known(table: dict[str, Any]) -> str:
    return f"supported: {', '.join(table)}; or add an entry to the table in {__name__}"
