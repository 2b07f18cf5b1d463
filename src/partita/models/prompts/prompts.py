"""Prompts for both towers: shared ones that travel, own ones that stay, and cross-attention that fuses the two."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from partita.core import memory, tensors
from partita.core.model import Model, Output
from partita.core.options import closest_match
from partita.core.rng import Key
from partita.core.tensors import Names, Tensors
from partita.models import ModelError
from partita.models.prompts.dual_encoder import DualEncoder, check_length

Fusion = Literal["local_queries", "global_queries", "both", "mean", "none"]
View = Literal["nothing", "grey"]
SPREAD = 0.02  # of prompts at the start
# For each way to fuse, whose prompts ask; the other's answer.
ASKING: dict[str, tuple[str, ...]] = {"local_queries": ("local",), "global_queries": ("global",)}
ASKING |= {"both": ("local", "global"), "mean": (), "none": ()}


@dataclass(frozen=True, eq=False)
class PromptModel(Model):
    """Towers with more parameters beside them; each kind says what it computes with these."""

    towers: DualEncoder
    name: str
    initial: Tensors
    tags: Mapping[str, Names]

    def losses(self, out: Output, targets: Tensor) -> Tensor:
        return self.towers.losses(out, targets)

    def remember(self, inputs: Tensors) -> Tensor:
        return self.towers.remember(inputs)

    def to(self, device: torch.device) -> None:
        self.towers.to(device)
        self.initial.update(tensors.to(self.initial, device))


@dataclass(frozen=True, eq=False)
class DualPrompts(PromptModel):
    """Where a tower has prompts, they enter it; a tower without any does as it always did."""

    fusion: Fusion

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        context, seen = (fuse(params, tower, self.fusion) for tower in ("text", "vision"))
        texts = self.towers.held["texts"] if context is None else self.towers.read(context)
        states = self.towers.see(inputs) if seen is None else self.towers.look(inputs["pixel_values"], seen)
        return self.towers.compare(params, states[:, 0], texts)

    def remember(self, inputs: Tensors) -> Tensor:
        if any({"prompt", "vision"} <= tags for tags in self.tags.values()):
            raise ModelError(
                "engine.cache_frozen: vision prompts change every layer of the tower of images and leave nothing to "
                "remember; set it to false"
            )
        return super().remember(inputs)


def dual_prompts(
    towers: DualEncoder,
    key: Key,
    *,
    text_tokens: int = 0,
    vision_tokens: int = 0,
    depth: int = 1,
    owners: tuple[str, ...] = ("global",),
    fusion: str = "none",
    output: float = 0.0,
    init_text: str = "",
    vision_init: str = "nothing",
) -> DualPrompts:
    """So many prompts for each tower and each owner. A phrase is what the context says at first, in its last places.

    `output` is how large the fusion's output projection is at first, beside the other projections. With `view` "grey",
    vision prompts start near the patches of a grey image.
    """
    for option, given, known in ("fusion", fusion, get_args(Fusion)), ("vision_init", vision_init, get_args(View)):
        if given not in known:
            raise ModelError(f"{option} is '{given}'; {closest_match(given, known)}")
    if min(text_tokens, vision_tokens) < 0:
        raise ModelError(
            f"there are {text_tokens} prompts of text and {vision_tokens} of vision; give 0 or more of each"
        )
    if not 1 <= depth <= (most := towers.depth()):
        raise ModelError(f"depth is {depth}, but {towers.name} has {most} layers; give 1 to {most}")
    initial, tags = dict(towers.initial), dict(towers.tags)
    for tower, shape in ("text", (text_tokens,)), ("vision", (depth, vision_tokens)):
        width = towers.width(tower)
        for owner in owners if shape[-1] else ():
            name = f"prompt.{tower}.{owner}"
            initial[name] = random_prompts(key / name, *shape, width)
            if tower == "text" and init_text:
                initial[name] = _saying(towers, init_text, initial[name])
            if tower == "vision" and vision_init == "grey":
                # The draw is added, or prompts in one place would never part.
                initial[name] = initial[name] + towers.glance(vision_tokens, depth).to(initial[name])
            tags[name] = frozenset({"prompt", owner, tower})
        for asking in ASKING[fusion] if shape[-1] and len(owners) > 1 else ():
            for part in ("query", "key", "value", "output"):
                name = f"fusion.{tower}.{asking}.{part}"
                start = random_prompts(key / name, width, width, spread=None)
                initial[name] = output * start if part == "output" else start
                tags[name] = frozenset({"fusion", tower})
    together = text_tokens * (len(owners) if fusion == "none" else 1)
    check_length(towers, together + int(towers.held["seen"].sum(1).max()))
    return DualPrompts(towers, towers.name, initial, tags, fusion)  # type: ignore[arg-type]


def random_prompts(key: Key, *shape: int, spread: float | None = SPREAD) -> Tensor:
    """Normal numbers; without a spread, such that a vector keeps its length on the way through."""
    memory.require(
        4 * math.prod(shape), f"prompts of the shape {shape}", "lower method.text_tokens or method.vision_tokens"
    )
    spread = shape[-1] ** -0.5 if spread is None else spread
    return spread * torch.randn(shape, generator=key.generator())


def fuse(params: Tensors, tower: str, fusion: str) -> Tensor | None:
    """The prompts that enter a tower, (..., token, width); None where there are none."""
    found = {owner: params.get(f"prompt.{tower}.{owner}") for owner in ("global", "local")}
    there = {owner: prompts for owner, prompts in found.items() if prompts is not None}
    if len(there) < 2:
        return next(iter(there.values()), None)
    if fusion == "none":
        return torch.cat([there["global"], there["local"]], -2)
    if fusion == "mean":
        return (there["global"] + there["local"]) / 2
    answers = [_attend(params, f"fusion.{tower}.{owner}", there, owner) for owner in ASKING[fusion]]
    return sum(answers[1:], start=answers[0]) / len(answers)


def _attend(params: Tensors, name: str, prompts: Mapping[str, Tensor], asking: str) -> Tensor:
    query, key, value, output = (params[f"{name}.{part}"] for part in ("query", "key", "value", "output"))
    own, other = prompts[asking], prompts["global" if asking == "local" else "local"]
    scores = (own @ query.mT) @ (other @ key.mT).mT / math.sqrt(own.shape[-1])  # (..., token, token)
    return own + (scores.softmax(-1) @ (other @ value.mT)) @ output.mT


def _saying(towers: DualEncoder, init_text: str, context: Tensor) -> Tensor:
    words = towers.embed([init_text])[0][0, 1:-1].to(context)  # without the tokens that begin and end a text
    if len(words) > len(context):
        raise ModelError(f"init_text '{init_text}' is {len(words)} tokens long; give as many prompts of text, or more")
    return torch.cat([context[: len(context) - len(words)], words])
