"""pFedPrompt's cache: a client's own labeled image features, which vote on its predictions by similarity."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from partita.core.model import Output
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.models import ModelError
from partita.models.prompts.dual_encoder import DualEncoder
from partita.models.prompts.prompts import PromptModel, dual_prompts

CONTEXT, KEYS, WEIGHT = "prompt.text.global", "cache.keys", "cache.weight"


@dataclass(frozen=True, eq=False)
class CachedFeatures(PromptModel):
    """A dual encoder with a shared context and a client's cache of image features.

    `cache.keys` (class, shot, feature) holds normalized features; a row of zeros is empty. `cache.weight` is 0 except
    in a client's own model, so training does not read the cache: its images would be their own nearest neighbors.

    Attributes:
        alpha: Weight of the cache in a client's own model.
        beta: Sharpness of the similarity.
        known: Whether the classes are those of the cache.
    """

    alpha: float
    beta: float
    known: bool = True

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        image = self.towers.image_features(inputs)[:, 0]
        out = self.towers.compare(params, image, self.towers.text_features(params[CONTEXT]))
        if not self.known:
            return out
        assert out.features is not None
        votes = similarities(out.features, params[KEYS].detach(), self.beta)
        return Output(out.logits + params[WEIGHT].detach() * votes.to(out.logits.dtype), out.features)

    def personal(self, params: Tensors) -> Tensors:
        return {**params, WEIGHT: torch.full_like(params[WEIGHT], self.alpha)}

    def for_classes(self, classes: tuple[str, ...]) -> CachedFeatures:
        """Return the model for classes that the cache has no images of: the context alone predicts."""
        other = super().for_classes(classes)
        assert isinstance(other, CachedFeatures)
        return replace(other, known=False)


def similarities(image: torch.Tensor, keys: torch.Tensor, beta: float) -> torch.Tensor:
    """Sum exp(-beta (1 - cosine)) over the keys of each class.

    Args:
        image: Normalized image features, (example, feature).
        keys: Normalized features, (class, shot, feature). Rows of zeros are empty and count nothing.
        beta: Sharpness.

    Returns:
        (example, class).
    """
    cosines = torch.einsum("ef,csf->ecs", image.to(keys.dtype), keys)
    return ((cosines - 1) * beta).exp().mul((keys != 0).any(-1)).sum(-1)


def feature_cache(
    towers: DualEncoder,
    key: Key,
    *,
    text_tokens: int,
    shots: int,
    alpha: float,
    beta: float,
    init_text: str = "",
    context_init: str = "nothing",
) -> CachedFeatures:
    """Add a shared context and an empty cache to a dual encoder.

    Args:
        towers: Dual encoder.
        key: Key for the initial values.
        text_tokens: Number of context tokens.
        shots: Number of images of each class in the cache.
        alpha: Weight of the cache in a client's own model.
        beta: Sharpness of the similarity.
        init_text: Initial text of the context.
        context_init: Initial values of the context; see `dual_prompts`.

    Raises:
        ModelError: If `text_tokens` or `shots` is below 1.
    """
    for option, given in ("text_tokens", text_tokens), ("shots", shots):
        if given < 1:
            raise ModelError(f"{option} is {given}; set it to 1 or more")
    plain = dual_prompts(towers, key, text_tokens=text_tokens, init_text=init_text, context_init=context_init)
    classes, width = towers.precomputed["texts"].shape
    initial = {**plain.initial, KEYS: torch.zeros(classes, shots, width), WEIGHT: torch.zeros(())}
    tags = {**plain.tags, KEYS: frozenset({"cache", "local", "vision"}), WEIGHT: frozenset({"head"})}
    return CachedFeatures(towers, plain.name, initial, tags, alpha, beta)
