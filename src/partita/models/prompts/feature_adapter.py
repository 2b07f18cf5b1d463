"""FedCLIP's adapter: attention weights over the entries of the image feature."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from partita.core.model import Output
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.models.prompts.dual_encoder import DualEncoder
from partita.models.prompts.prompts import PromptModel


@dataclass(frozen=True, eq=False)
class FeatureAdapter(PromptModel):
    """A frozen dual encoder whose image features are multiplied by a learned gate."""

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        image = self.towers.image_features(inputs)[:, 0]  # (example, feature)
        return self.towers.compare(params, image * gate(params, image), self.towers.precomputed["texts"])


def gate(params: Tensors, image: torch.Tensor) -> torch.Tensor:
    """Return the attention weights of image features, (example, feature)."""

    def linear(part: str, value: torch.Tensor) -> torch.Tensor:
        weight, bias = params[f"adapter.{part}.weight"], params[f"adapter.{part}.bias"]
        return functional.linear(value.to(weight.dtype), weight, bias)

    return linear("out", linear("in", image).tanh()).softmax(-1)


def feature_adapter(towers: DualEncoder, key: Key) -> FeatureAdapter:
    """Add an adapter with random initial weights to a dual encoder."""
    width = towers.precomputed["texts"].shape[1]
    initial, tags = dict(towers.initial), dict(towers.tags)
    for part in ("in", "out"):
        for leaf, shape in ("weight", (width, width)), ("bias", (width,)):
            name = f"adapter.{part}.{leaf}"
            numbers = torch.rand(shape, generator=(key / name).generator())
            initial[name] = (2 * numbers - 1) / width**0.5  # as torch initializes a linear layer
            tags[name] = frozenset({"adapter", "global", "vision"})
    return FeatureAdapter(towers, towers.name, initial, tags)
