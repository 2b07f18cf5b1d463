"""Prompts for both towers: shared prompts, which are sent, personal prompts, which stay, and their fusion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from partita.core import memory, tensors
from partita.core.model import Model, Output
from partita.core.options import closest_match
from partita.core.rng import Key
from partita.core.tensors import Names, Tensors
from partita.models import ModelError
from partita.models.prompts.dual_encoder import DualEncoder, check_length

Fusion = Literal["local_queries", "global_queries", "both", "mean", "none"]
VisionInit = Literal["nothing", "gray", "tokens"]
ContextInit = Literal["nothing", "tokens"]
INITIAL_STD = 0.02  # standard deviation of initial prompts
# For each fusion, the owners whose prompts are the queries. The other owner's prompts are keys and values.
QUERY_OWNERS: dict[str, tuple[str, ...]] = {"local_queries": ("local",), "global_queries": ("global",)}
QUERY_OWNERS |= {"both": ("local", "global"), "mean": (), "none": ()}


@dataclass(frozen=True, eq=False)
class PromptModel(Model):
    """Base class of a frozen dual encoder with trainable prompts or adapters.

    Attributes:
        towers: The frozen dual encoder.
    """

    towers: DualEncoder
    name: str
    initial: Tensors
    tags: Mapping[str, Names]

    def losses(self, out: Output, targets: torch.Tensor) -> torch.Tensor:
        return self.towers.losses(out, targets)

    def class_losses(
        self, out: Output, targets: torch.Tensor, label_smoothing: float, class_weights: Sequence[float]
    ) -> torch.Tensor:
        return self.towers.class_losses(out, targets, label_smoothing, class_weights)

    def for_classes(self, classes: tuple[str, ...]) -> PromptModel:
        towers = self.towers.for_classes(classes)
        check_length(towers, self.context_length() + int(towers.precomputed["attention_mask"].sum(1).max()))
        return replace(self, towers=towers)

    def context_length(self) -> int:
        """Return the number of learned tokens before a class name; 0 if it is not learned."""
        names = ("prompt.text.global", "prompt.text.local")
        return max((len(self.initial[name]) for name in names if name in self.initial), default=0)

    def features_to_cache(self, inputs: Tensors) -> torch.Tensor:
        """Return the image features to cache; see `DualEncoder.features_to_cache`."""
        return self.towers.features_to_cache(inputs)

    def frozen_weights(self) -> Tensors:
        return self.towers.frozen_weights()

    def to(self, device: torch.device) -> None:
        self.towers.to(device)
        self.initial.update(tensors.to(self.initial, device))


@dataclass(frozen=True, eq=False)
class DualPrompts(PromptModel):
    """A dual encoder with prompts in one tower or both."""

    fusion: Fusion

    def context_length(self) -> int:
        both = {"prompt.text.global", "prompt.text.local"} <= self.initial.keys()
        return super().context_length() * (2 if both and self.fusion == "none" else 1)

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        context, vision_prompts = (fuse(params, tower, self.fusion) for tower in ("text", "vision"))
        texts = self.towers.precomputed["texts"] if context is None else self.towers.text_features(context)
        if vision_prompts is None:
            states = self.towers.image_features(inputs)
        else:
            states = self.towers.encode_image(inputs["pixel_values"], vision_prompts)
        return self.towers.compare(params, states[:, 0], texts)

    def features_to_cache(self, inputs: Tensors) -> torch.Tensor:
        if any({"prompt", "vision"} <= tags for tags in self.tags.values()):
            raise ModelError(
                "engine.cache_frozen: vision prompts change every layer of the image tower, so nothing can be cached; "
                "set it to false"
            )
        return super().features_to_cache(inputs)


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
    context_init: str = "nothing",
) -> DualPrompts:
    """Add prompts to a dual encoder.

    Args:
        towers: Dual encoder.
        key: Key for the initial values.
        text_tokens: Number of text prompts per owner.
        vision_tokens: Number of vision prompts per owner and layer.
        depth: Number of layers with vision prompts.
        owners: "global" for shared prompts, "local" for personal prompts.
        fusion: How shared and personal prompts are combined.
        output: Initial scale of the fusion's output projections, relative to the other projections.
        init_text: Initial text of the context, in its last positions.
        vision_init: "nothing" draws vision prompts from N(0, 0.02²), "gray" adds the patches of a gray image, "tokens"
            draws them with the mean and standard deviation of these patches.
        context_init: "nothing" draws the context from N(0, 0.02²), "tokens" draws it with the mean and standard
            deviation of the token embeddings.

    Raises:
        ModelError: If an option is invalid or the texts become too long.
    """
    for option, given, known in (
        ("fusion", fusion, get_args(Fusion)),
        ("vision_init", vision_init, get_args(VisionInit)),
        ("context_init", context_init, get_args(ContextInit)),
    ):
        if given not in known:
            raise ModelError(f"{option} is '{given}'; {closest_match(given, known)}")
    if min(text_tokens, vision_tokens) < 0:
        raise ModelError(f"text_tokens is {text_tokens} and vision_tokens is {vision_tokens}; set both to 0 or more")
    if not 1 <= depth <= (layers := towers.depth()):
        raise ModelError(f"depth is {depth}, but {towers.name} has {layers} layers; set it to 1 to {layers}")
    initial, tags = dict(towers.initial), dict(towers.tags)
    for tower, shape in ("text", (text_tokens,)), ("vision", (depth, vision_tokens)):
        width = towers.width(tower)
        for owner in owners if shape[-1] else ():
            name = f"prompt.{tower}.{owner}"
            initial[name] = random_prompts(key / name, *shape, width)
            if tower == "text" and context_init == "tokens":
                initial[name] = _like_tokens(initial[name], towers.token_embeddings())
            if tower == "vision" and vision_init == "tokens":
                initial[name] = _like_tokens(initial[name], towers.gray_image_patches(depth))
            if tower == "text" and init_text:
                initial[name] = _start_from_text(towers, init_text, initial[name])
            if tower == "vision" and vision_init == "gray":
                # Add the random draw: equal prompts at the same position would never diverge.
                initial[name] = initial[name] + towers.gray_image_states(vision_tokens, depth).to(initial[name])
            tags[name] = frozenset({"prompt", owner, tower})
        for query_owner in QUERY_OWNERS[fusion] if shape[-1] and len(owners) > 1 else ():
            for part in ("query", "key", "value", "output"):
                name = f"fusion.{tower}.{query_owner}.{part}"
                start = random_prompts(key / name, width, width, std=None)
                initial[name] = output * start if part == "output" else start
                tags[name] = frozenset({"fusion", tower})
    together = text_tokens * (len(owners) if fusion == "none" else 1)
    check_length(towers, together + int(towers.precomputed["attention_mask"].sum(1).max()))
    return DualPrompts(towers, towers.name, initial, tags, fusion)  # type: ignore[arg-type]


def random_prompts(key: Key, *shape: int, std: float | None = INITIAL_STD) -> torch.Tensor:
    """Return normal random numbers of the given shape.

    Args:
        key: Key for the draw.
        *shape: Shape of the tensor.
        std: Standard deviation. None: 1 / sqrt(last dimension), which preserves norms.

    Raises:
        SizeError: If the tensor would not fit into memory.
    """
    memory.require(
        4 * math.prod(shape), f"prompts of the shape {shape}", "lower method.text_tokens or method.vision_tokens"
    )
    std = shape[-1] ** -0.5 if std is None else std
    return std * torch.randn(shape, generator=key.generator())


def _like_tokens(drawn: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Give a draw from N(0, 0.02²) the mean and standard deviation of each entry of tokens, (..., token, width).

    Towers normalize what they read, so a prompt at another scale than the tokens around it acts at full strength all
    the same, and its gradient grows by the ratio of the scales.
    """
    tokens = tokens.float()
    mean, std = tokens.mean(-2, keepdim=True), tokens.std(-2, correction=0, keepdim=True)
    return (drawn / INITIAL_STD * std.to(drawn.device) + mean.to(drawn.device)).to(drawn.dtype)


def fuse(params: Tensors, tower: str, fusion: str) -> torch.Tensor | None:
    """Combine the shared and personal prompts of a tower.

    Args:
        params: Parameters.
        tower: "text" or "vision".
        fusion: "none" concatenates the prompts, "mean" averages them, the others apply cross-attention.

    Returns:
        (..., token, width), or None if the tower has no prompts.
    """
    candidates = {owner: params.get(f"prompt.{tower}.{owner}") for owner in ("global", "local")}
    by_owner = {owner: prompts for owner, prompts in candidates.items() if prompts is not None}
    if len(by_owner) < 2:
        return next(iter(by_owner.values()), None)
    if fusion == "none":
        return torch.cat([by_owner["global"], by_owner["local"]], -2)
    if fusion == "mean":
        return (by_owner["global"] + by_owner["local"]) / 2
    attended = [_attend(params, f"fusion.{tower}.{owner}", by_owner, owner) for owner in QUERY_OWNERS[fusion]]
    return sum(attended[1:], start=attended[0]) / len(attended)


def _attend(params: Tensors, name: str, prompts: Mapping[str, torch.Tensor], query_owner: str) -> torch.Tensor:
    query, key, value, output = (params[f"{name}.{part}"] for part in ("query", "key", "value", "output"))
    own, other = prompts[query_owner], prompts["global" if query_owner == "local" else "local"]
    scores = (own @ query.mT) @ (other @ key.mT).mT / math.sqrt(own.shape[-1])  # (..., token, token)
    return own + (scores.softmax(-1) @ (other @ value.mT)) @ output.mT


def _start_from_text(towers: DualEncoder, init_text: str, context: torch.Tensor) -> torch.Tensor:
    states, mask = towers.embed([init_text])
    embeddings = states[0, towers.start_tokens() : int(mask.sum()) - 1].to(context)  # without special tokens
    if len(embeddings) > len(context):
        raise ModelError(
            f"init_text '{init_text}' has {len(embeddings)} tokens; set text_tokens to {len(embeddings)} or more"
        )
    return torch.cat([context[: len(context) - len(embeddings)], embeddings])
