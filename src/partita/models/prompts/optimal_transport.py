"""FedOTP's comparison: a shared and an own context share out an image's patches by optimal transport."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from partita.core.model import Output
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.models import ModelError
from partita.models.prompts.dual_encoder import SCALE, DualEncoder
from partita.models.prompts.prompts import PromptModel, dual_prompts

OWNERS = ("global", "local")


@dataclass(frozen=True, eq=False)
class OptimalTransportPrompts(PromptModel):
    """Each class has a text by each owner; a logit is the similarity of patches and texts under their transport."""

    mass: float
    smoothing: float
    iterations: int

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        states = functional.normalize(self.towers.see(inputs, patches=True), dim=-1)
        texts = torch.stack([self.towers.read(params[f"prompt.text.{owner}"]) for owner in OWNERS])
        texts = functional.normalize(texts, dim=-1)  # (owner, class, feature)
        alike = torch.einsum("epf,ocf->ecpo", states[:, 1:], texts)  # (example, class, patch, owner)
        # The transport is a weight and not a road for gradients, as in the paper.
        moved = sinkhorn(1 - alike.detach(), self.mass, self.smoothing, self.iterations)
        return Output(params[SCALE].exp() * (moved * alike).sum((-1, -2)), states[:, 0])

    def remember(self, inputs: Tensors) -> Tensor:
        return self.towers.remember(inputs, patches=True)


def optimal_transport_prompts(
    towers: DualEncoder,
    key: Key,
    *,
    text_tokens: int,
    mass: float,
    smoothing: float,
    iterations: int,
    init_text: str = "",
) -> OptimalTransportPrompts:
    if text_tokens < 1:
        raise ModelError(f"there are {text_tokens} prompts of text; give 1 or more")
    plain = dual_prompts(towers, key, text_tokens=text_tokens, owners=OWNERS, fusion="mean", init_text=init_text)
    return OptimalTransportPrompts(towers, plain.name, plain.initial, plain.tags, mass, smoothing, iterations)


def sinkhorn(cost: Tensor, mass: float, smoothing: float, iterations: int) -> Tensor:
    """How much of each patch goes to each text, (..., patch, text), at least cost and with an entropy as smoothing.

    A patch gives at most its share of 1, and each text gets its share of the mass, exactly. Always so many rounds of
    Sinkhorn's scaling: a stop that looks at values could not be lifted over clients.
    """
    patches, texts = cost.shape[-2:]
    # Scaling a text's column leaves the plan as it is, and the largest entry of 1 keeps a column from vanishing.
    kernel = ((cost.amin(-2, keepdim=True) - cost) / smoothing).exp()
    gives, gets = 1 / patches, mass / texts
    left = torch.ones_like(cost[..., 0])  # (..., patch)
    right = torch.ones_like(cost[..., 0, :])  # (..., text)
    for _ in range(iterations):
        left = (gives / (kernel @ right.unsqueeze(-1)).squeeze(-1)).clamp(max=1)
        right = gets / (kernel.mT @ left.unsqueeze(-1)).squeeze(-1)
    return left.unsqueeze(-1) * kernel * right.unsqueeze(-2)
