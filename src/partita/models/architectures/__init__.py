"""Supported architectures: how to run each module, and the role of each parameter by its name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from partita.core.tensors import Names
from partita.models import ModelError
from partita.models.architectures import clip, decoders, encoders, vision
from partita.models.architectures.general import GENERAL, general_tags
from partita.models.architectures.spec import ROLES, Architecture, Forward, Pooling
from partita.tasks import Head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "ARCHITECTURES",
    "ROLES",
    "Architecture",
    "Forward",
    "Pooling",
    "architecture",
    "forward_of",
    "head_names",
    "is_known",
    "table_tags",
    "tags_of",
]

# Keyed by transformers' config.model_type: exact tables of roles, which every parameter must match, and forward
# functions that torch.vmap can lift. All other types use `GENERAL`.
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


def is_known(model_type: str) -> bool:
    """Return whether a model type has a table of its own, and not the general naming patterns."""
    return model_type in ARCHITECTURES


def architecture(model_type: str) -> Architecture:
    """Return the architecture of a model type; the general one for a type without a table."""
    return ARCHITECTURES.get(model_type, GENERAL)


def forward_of(model_type: str, head: Head, pooling: Pooling = "model") -> Forward:
    """Return the forward function of an architecture for a head.

    Args:
        model_type: The `model_type` in the config of transformers.
        head: The head.
        pooling: What the head reads: what it reads in transformers, or a mean of all tokens.

    Raises:
        ModelError: If the model type is not supported with this head or pooling.
    """
    heads = architecture(model_type).heads
    if pooling != "model":
        if pooling not in architecture(model_type).pooling or head != "text":
            known = ", ".join(sorted(name for name, each in ARCHITECTURES.items() if pooling in each.pooling))
            raise ModelError(
                f"pooling = '{pooling}' is for text classification with one of {known}, not for a '{model_type}' and "
                f"tasks of kind {head}; leave pooling out"
            )
        return architecture(model_type).pooling[pooling]
    if head in heads:
        return heads[head]
    raise ModelError(
        f"partita supports '{model_type}' for tasks of kind {' or '.join(heads)}, not {head}; "
        f"choose another model, or add that head to ARCHITECTURES in {__name__}"
    )


def head_names(module: PreTrainedModel) -> Names:
    """Return the names of the parameters that belong to the head. Fused projections need not be split yet."""
    names, model_type = dict(module.named_parameters()), str(module.config.model_type)
    if not is_known(model_type):
        return frozenset(name for name, tags in general_tags(module).items() if "head" in tags) & names.keys()
    patterns = [re.compile(pattern) for pattern, role, *_ in architecture(model_type).roles if role == "head"]
    return frozenset(name for name in names if any(pattern.fullmatch(name) for pattern in patterns))


def tags_of(module: PreTrainedModel) -> dict[str, Names]:
    """Return the tags of each parameter: exactly one role, "layer.N" inside a layer, and further tags.

    A tied parameter has the tags of all its names.

    Args:
        module: The module. It may be on the meta device.

    Raises:
        ModelError: If the table of the architecture does not give a parameter exactly one role.
    """
    paths = dict(module.named_parameters(remove_duplicate=False))
    model_type = str(module.config.model_type)
    by_path = table_tags(model_type, paths) if is_known(model_type) else general_tags(module)
    first = {id(value): name for name, value in module.named_parameters()}
    tags = dict.fromkeys(first.values(), frozenset[str]())
    for path, value in paths.items():
        tags[first[id(value)]] |= by_path[path]
    return tags


def table_tags(model_type: str, names: Iterable[str]) -> dict[str, Names]:
    """Return the tags of each parameter name by the table of an architecture.

    Args:
        model_type: The `model_type` in the config of transformers, a key of `ARCHITECTURES`.
        names: The names of all parameters.

    Raises:
        ModelError: If a name does not match exactly one rule.
    """
    table = [(re.compile(pattern), tags) for pattern, *tags in ARCHITECTURES[model_type].roles]
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
