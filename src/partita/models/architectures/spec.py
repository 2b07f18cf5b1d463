"""Description of an architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from partita.core.model import Output
from partita.core.tensors import Tensors
from partita.models import Pooling
from partita.tasks import Head

ROLES = ("query", "key", "value", "output", "mlp", "norm", "embedding", "head")  # and "other", for no role

TagRule = tuple[str, ...]  # pattern of the full parameter name, role, further tags
Forward = Callable[[Any, Tensors], Output]


@dataclass(frozen=True)
class InputSide:
    """The path from an input to the first layer. Paths are relative to the module's body."""

    input_name: str  # key of the input in a batch, such as "pixel_values"
    embeds: tuple[str, ...]  # submodules before the first layer; some modules lack some of them
    layers: str  # path of the layers


@dataclass(frozen=True)
class Architecture:
    """How to run and tag the parameters of an architecture.

    Attributes:
        roles: Tag rules. The group "layer" of a pattern becomes the tag "layer.N".
        heads: Forward function for each supported head.
        pooling: Forward function of text classification for each other pooling than the model's own.
        transposed: Whether weights are (in, out), as GPT-2's Conv1D holds them, and not (out, in) as nn.Linear does.
        start: The input side. Without it, frozen layers cannot be cached and no layers can be skipped.
        packs: Whether the forward functions take packed rows: "position_ids", and "segment_ids" that do not attend to
            one another.
    """

    roles: tuple[TagRule, ...]
    heads: Mapping[Head, Forward]
    pooling: Mapping[Pooling, Forward] = field(default_factory=dict)
    transposed: bool = False
    start: InputSide | None = None
    packs: bool = False


def tag_rules(stem: str, roles: Mapping[str, str], *tags: str) -> tuple[TagRule, ...]:
    """Return one rule for each pattern, prefixed with `stem`.

    Args:
        stem: Pattern of the part of the names that all rules share.
        roles: The role by pattern of the rest of the name.
        *tags: Further tags of all rules.
    """
    return tuple((stem + pattern, role, *tags) for pattern, role in roles.items())


def head_dropout(module: Any, states: torch.Tensor) -> torch.Tensor:
    """Apply the dropout before the last layer of a head, if the module has one.

    Args:
        module: The module with the head.
        states: The input of the head's last layer, with the example dimension first.
    """
    dropout = getattr(module, "dropout", None)
    return states if dropout is None else dropout(states)
