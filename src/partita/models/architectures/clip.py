"""CLIP: the image tower with a linear head, or both towers with one text per class."""

from __future__ import annotations

from typing import Any

from partita.core.model import Output
from partita.core.tensors import Tensors
from partita.models.architectures.spec import Architecture, TagRule, tag_rules


def _tower(name: str) -> tuple[TagRule, ...]:
    layer = {
        r"self_attn\.q_proj\..+": "query",
        r"self_attn\.k_proj\..+": "key",
        r"self_attn\.v_proj\..+": "value",
        r"self_attn\.out_proj\..+": "output",
        r"mlp\..+": "mlp",
        r"layer_norm[12]\..+": "norm",
    }
    outside = {
        r"embeddings\..+": "embedding",
        r"(pre_layrnorm|post_layernorm|final_layer_norm)\..+": "norm",
    }
    return (
        *tag_rules(rf"{name}_model\.encoder\.layers\.(?P<layer>\d+)\.", layer, name),
        *tag_rules(rf"{name}_model\.", outside, name),
    )


def _classes(module: Any, inputs: Tensors) -> Output:
    if hasattr(module, "classifier"):
        state = module.vision_model(**inputs).last_hidden_state  # (example, token, width)
        features = state[:, 1:].mean(1)
        return Output(module.classifier(features), features)
    # Compare images (example, ...) with the texts of all classes (class, token).
    out = module(**inputs)
    return Output(out.logits_per_image, out.image_embeds)


CLIP = Architecture(
    roles=(
        *_tower("vision"),
        *_tower("text"),
        (r"visual_projection\..+", "head", "vision"),
        (r"text_projection\..+", "head", "text"),
        (r"logit_scale", "head"),
        (r"classifier\..+", "head"),
    ),
    heads={"image": _classes},
)
