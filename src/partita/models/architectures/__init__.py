"""Supported architectures: how to run each module, and the role of each parameter by its name."""

from __future__ import annotations

import re
from collections.abc import Iterable

from partita.core.tensors import Names
from partita.models import ModelError
from partita.models.architectures import clip, decoders, encoders, vision
from partita.models.architectures.spec import ROLES, Architecture, Forward
from partita.tasks import Head

__all__ = [
    "ARCHITECTURES",
    "ROLES",
    "Architecture",
    "Forward",
    "architecture",
    "forward_of",
    "head_names",
    "tags_of",
]

# Keyed by transformers' config.model_type. To add an architecture, add an entry.
ARCHITECTURES = {
    "vit": vision.like_vit("vit"),
    "deit": vision.like_vit("deit"),
    "dinov2": vision.like_dinov2("dinov2"),
    "dinov2_with_registers": vision.like_dinov2("dinov2_with_registers"),
    "bert": encoders.like_bert("bert", encoders.pooled),
    "roberta": encoders.like_bert("roberta", encoders.all_tokens),
    "electra": encoders.like_bert("electra", encoders.all_tokens),
    "distilbert": encoders.DISTILBERT,
    "gpt2": decoders.GPT2,
    "llama": decoders.LLAMA,
    "mistral": decoders.LLAMA,
    "qwen2": decoders.LLAMA,
    "qwen3": decoders.LLAMA,
    "clip": clip.CLIP,
}


def architecture(model_type: str) -> Architecture:
    """Return the architecture of a model type.

    Raises:
        ModelError: If the model type is not supported.
    """
    if model_type not in ARCHITECTURES:
        raise ModelError(
            f"partita does not support the architecture '{model_type}', only: {', '.join(ARCHITECTURES)}; "
            f"add '{model_type}' with its heads and its table of roles to ARCHITECTURES in {__name__}"
        )
    return ARCHITECTURES[model_type]


def forward_of(model_type: str, head: Head) -> Forward:
    """Return the forward function of an architecture for a head.

    Raises:
        ModelError: If the model type is not supported, or not with this head.
    """
    heads = architecture(model_type).heads
    if head in heads:
        return heads[head]
    raise ModelError(
        f"partita supports '{model_type}' for tasks of kind {' or '.join(heads)}, not {head}; "
        f"choose another model, or add that head to ARCHITECTURES in {__name__}"
    )


def head_names(model_type: str, names: Iterable[str]) -> Names:
    """Return the parameter names that belong to the head.

    Args:
        model_type: The `model_type` in the config of transformers.
        names: The names of all parameters.
    """
    patterns = [re.compile(pattern) for pattern, role, *_ in architecture(model_type).roles if role == "head"]
    return frozenset(name for name in names if any(pattern.fullmatch(name) for pattern in patterns))


def tags_of(model_type: str, names: Iterable[str]) -> dict[str, Names]:
    """Return the tags of each parameter name: exactly one role, "layer.N" inside a layer, and extra tags of its rule.

    Args:
        model_type: The `model_type` in the config of transformers.
        names: The names of all parameters.

    Raises:
        ModelError: If a name does not match exactly one rule.
    """
    table = [(re.compile(pattern), tags) for pattern, *tags in architecture(model_type).roles]
    return {name: _tags(model_type, name, table) for name in names}


def _tags(model_type: str, name: str, table: list[tuple[re.Pattern[str], list[str]]]) -> Names:
    matches = [(match, tags) for pattern, tags in table if (match := pattern.fullmatch(name))]
    if len(matches) != 1 or matches[0][1][0] not in ROLES:
        matched = ", ".join(f"'{tags[0]}'" for _, tags in matches) or "nothing"
        raise ModelError(
            f"the parameter '{name}' of '{model_type}' must have exactly one role of {', '.join(ROLES)}, but the table "
            f"gives it {matched}; add or correct its row (pattern, role) in ARCHITECTURES in {__name__}"
        )
    match, tags = matches[0]
    layer = match.groupdict().get("layer")
    return frozenset(tags if layer is None else (*tags, f"layer.{layer}"))
