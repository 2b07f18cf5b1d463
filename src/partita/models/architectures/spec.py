"""What partita must know of an architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from partita.core.model import Output
from partita.core.tensors import Tensors
from partita.models import Kind

ROLES = ("query", "key", "value", "output", "mlp", "norm", "embedding", "head")

TagRule = tuple[str, ...]  # pattern of the whole parameter name, role, and tags beyond that, if any
Forward = Callable[[Any, Tensors], Output]


@dataclass(frozen=True)
class InputSide:
    """How an input becomes what enters the first layer, by paths within the module's body."""

    takes: str  # the input
    embeds: tuple[str, ...]  # the parts before the first layer; not every module has them all
    layers: str


@dataclass(frozen=True)
class Architecture:
    """The group "layer" of a row's pattern becomes the tag "layer.N". `split` parts what the module holds as one."""

    roles: tuple[TagRule, ...]
    heads: Mapping[Kind, Forward]
    split: Callable[[nn.Module], None] | None = None
    transposed: bool = False  # weights are (in, out), as GPT-2's Conv1D holds them, and not (out, in) as nn.Linear does
    start: InputSide | None = None  # without it, frozen layers cannot be cached


def tag_rules(stem: str, roles: Mapping[str, str], *tags: str) -> tuple[TagRule, ...]:
    """One row for each pattern below the stem."""
    return tuple((stem + pattern, role, *tags) for pattern, role in roles.items())
