"""For each architecture: how its module is run, and what each parameter is for, read from its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from partita.core.model import Output
from partita.core.tree import Names, Tensors
from partita.models import ModelError

ROLES = ("query", "key", "value", "output", "mlp", "norm", "embedding", "head")


@dataclass(frozen=True)
class Architecture:
    """A row of `roles` is (pattern of the whole parameter name, role); its group "layer" becomes the tag "layer.N"."""

    forward: Callable[[Any, Tensors], Output]
    roles: tuple[tuple[str, str], ...]


def _vit(module: Any, inputs: Tensors) -> Output:
    features = module.vit(**inputs).last_hidden_state[:, 0]  # of (example, token, width) the class token
    return Output(module.classifier(features), features)


_VIT_LAYER = r"vit\.layers\.(?P<layer>\d+)\."

# By transformers' config.model_type. A new architecture is one more entry.
ARCHITECTURES = {
    "vit": Architecture(
        forward=_vit,
        roles=(
            (r"vit\.embeddings\..+", "embedding"),
            (_VIT_LAYER + r"attention\.q_proj\..+", "query"),
            (_VIT_LAYER + r"attention\.k_proj\..+", "key"),
            (_VIT_LAYER + r"attention\.v_proj\..+", "value"),
            (_VIT_LAYER + r"attention\.o_proj\..+", "output"),
            (_VIT_LAYER + r"mlp\..+", "mlp"),
            (_VIT_LAYER + r"layernorm_(before|after)\..+", "norm"),
            (r"vit\.layernorm\..+", "norm"),
            (r"classifier\..+", "head"),
        ),
    ),
}


def architecture(model_type: str) -> Architecture:
    if model_type not in ARCHITECTURES:
        raise ModelError(
            f"partita does not know the architecture '{model_type}', only: {', '.join(ARCHITECTURES)}; "
            f"add '{model_type}' with its forward and its table of roles to ARCHITECTURES in {__name__}"
        )
    return ARCHITECTURES[model_type]


def tags_of(model_type: str, names: Iterable[str]) -> dict[str, Names]:
    """The tags of each name: exactly one role, and the layer where there is one."""
    patterns = [(re.compile(pattern), role) for pattern, role in architecture(model_type).roles]
    return {name: _tags(model_type, name, patterns) for name in names}


def _tags(model_type: str, name: str, patterns: list[tuple[re.Pattern[str], str]]) -> Names:
    found = [(match, role) for pattern, role in patterns if (match := pattern.fullmatch(name))]
    if len(found) != 1 or found[0][1] not in ROLES:
        matched = ", ".join(f"'{role}'" for _, role in found) or "nothing"
        raise ModelError(
            f"the parameter '{name}' of '{model_type}' must have exactly one role of {', '.join(ROLES)}, but the table "
            f"gives it {matched}; add or correct its row (pattern, role) in ARCHITECTURES in {__name__}"
        )
    match, role = found[0]
    layer = match.groupdict().get("layer")
    return frozenset((role,) if layer is None else (role, f"layer.{layer}"))
