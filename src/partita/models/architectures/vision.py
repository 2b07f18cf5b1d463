"""Vision Transformers: ViT, DeiT, DINOv2 with and without registers."""

from __future__ import annotations

from typing import Any

import torch

from partita.core.model import Output
from partita.core.tensors import Tensors
from partita.models.architectures.spec import Architecture, InputSide, tag_rules

# The second alternative is DINOv2's name before transformers 5.20.
_PROJECTIONS = {
    r"attention\.(q_proj|attention\.query)\..+": "query",
    r"attention\.(k_proj|attention\.key)\..+": "key",
    r"attention\.(v_proj|attention\.value)\..+": "value",
    r"attention\.(o_proj|output\.dense)\..+": "output",
    r"mlp\..+": "mlp",
}


def like_vit(body: str) -> Architecture:
    """Return the architecture of a ViT whose encoder is named `body` in the module."""
    return Architecture(
        roles=(
            (rf"{body}\.embeddings\..+", "embedding"),
            *tag_rules(rf"{body}\.layers\.(?P<layer>\d+)\.", {**_PROJECTIONS, r"layernorm_(before|after)\..+": "norm"}),
            (rf"{body}\.layernorm\..+", "norm"),
            (r"classifier\..+", "head"),
        ),
        heads={"image": _class_token},
        start=InputSide("pixel_values", ("embeddings",), "layers"),
    )


def like_dinov2(body: str) -> Architecture:
    """Return the architecture of a DINOv2 whose encoder is named `body` in the module."""
    # A layer scale is a diagonal matrix on the output of the preceding block, and has the role of that output.
    own = {r"norm[12]\..+": "norm", r"layer_scale1\..+": "output", r"layer_scale2\..+": "mlp"}
    return Architecture(
        roles=(
            (rf"{body}\.embeddings\..+", "embedding"),
            *tag_rules(rf"{body}\.encoder\.layer\.(?P<layer>\d+)\.", {**_PROJECTIONS, **own}),
            (rf"{body}\.layernorm\..+", "norm"),
            (r"classifier\..+", "head"),
        ),
        heads={"image": _class_token_and_mean},
        start=InputSide("pixel_values", ("embeddings",), "encoder.layer"),
    )


def _class_token(module: Any, inputs: Tensors) -> Output:
    features = module.base_model(**inputs).last_hidden_state[:, 0]  # class token of (example, token, width)
    return Output(module.classifier(features), features)


def _class_token_and_mean(module: Any, inputs: Tensors) -> Output:
    state = module.base_model(**inputs).last_hidden_state  # (example, token, width)
    patches = state[:, 1 + getattr(module.config, "num_register_tokens", 0) :]
    features = torch.cat([state[:, 0], patches.mean(1)], 1)
    return Output(module.classifier(features), features)
