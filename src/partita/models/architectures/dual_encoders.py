"""Two towers, of images and of texts, run layer by layer, so that prompts can enter between layers.

A CLIP and transformers' VisionTextDualEncoderModel hold them under the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partita.core.options import closest_match
from partita.models import ModelError

DUAL_ENCODERS = ("clip", "vision-text-dual-encoder")


@dataclass(frozen=True)
class ImageTowerSpec:
    """A tower of images. States are (example, token, width); the first token stands for the image."""

    enter: Callable[[Any, Tensor], Tensor]  # from pixels to what enters the first layer
    layers: str
    leave: Callable[[Any, Tensor], Tensor]  # what is done to each token after the last layer
    beside: tuple[None, ...] = ()  # what a layer wants to be given beside the states: a CLIP's, a mask, if only None


@dataclass(frozen=True)
class TextTowerSpec:
    """A tower of texts. States are (text, token, width); `seen` (text, token) is false for padding."""

    words: str  # the table of tokens
    enter: Callable[[Any, Tensor], Tensor]  # from embedded tokens to what enters the first layer
    layers: str
    causal: bool
    pool: Callable[[Any, Tensor, Tensor], Tensor]  # from states and `seen` to (text, width)


def _clip_words(tower: Any, states: Tensor) -> Tensor:
    places: Tensor = tower.embeddings.position_embedding.weight[: states.shape[1]]
    return states + places


def _last(tower: Any, states: Tensor, seen: Tensor) -> Tensor:
    """The state of the last token that is no padding."""
    # A product and not an index: it has the same bits on a GPU each time, also on the way back.
    ends = torch.arange(seen.shape[1], device=seen.device) == seen.sum(1, keepdim=True) - 1  # (text, token)
    normed: Tensor = tower.final_layer_norm((states * ends.unsqueeze(-1)).sum(1))
    return normed


IMAGE_TOWERS = {
    "clip_vision_model": ImageTowerSpec(
        enter=lambda tower, pixels: tower.pre_layrnorm(tower.embeddings(pixels)),
        layers="encoder.layers",
        leave=lambda tower, states: tower.post_layernorm(states),
        beside=(None,),
    ),
    **dict.fromkeys(
        ("dinov2", "dinov2_with_registers"),
        ImageTowerSpec(
            enter=lambda tower, pixels: tower.embeddings(pixels),
            layers="encoder.layer",
            leave=lambda tower, states: tower.layernorm(states),
        ),
    ),
}

TEXT_TOWERS = {
    "clip_text_model": TextTowerSpec(
        words="embeddings.token_embedding",
        enter=_clip_words,
        layers="encoder.layers",
        causal=True,
        pool=_last,
    ),
    "bert": TextTowerSpec(
        words="embeddings.word_embeddings",
        enter=lambda tower, states: tower.embeddings(inputs_embeds=states),
        layers="encoder.layer",
        causal=False,
        pool=lambda tower, states, seen: tower.pooler(states),
    ),
}


def image_tower_spec(model_type: str) -> ImageTowerSpec:
    if model_type not in IMAGE_TOWERS:
        raise ModelError(f"partita cannot put prompts into a tower of images '{model_type}'; {_known(IMAGE_TOWERS)}")
    return IMAGE_TOWERS[model_type]


def text_tower_spec(model_type: str) -> TextTowerSpec:
    if model_type not in TEXT_TOWERS:
        raise ModelError(f"partita cannot put prompts into a tower of texts '{model_type}'; {_known(TEXT_TOWERS)}")
    return TEXT_TOWERS[model_type]


def check_dual_encoder(path: str, model_type: str) -> None:
    if model_type not in DUAL_ENCODERS:
        raise ModelError(
            f"'{path}' is a '{model_type}', which has no tower of texts beside one of images; "
            f"{closest_match(model_type, DUAL_ENCODERS)}"
        )


def _known(table: dict[str, Any]) -> str:
    return f"it can be: {', '.join(table)}; or add its row to the table in {__name__}"
