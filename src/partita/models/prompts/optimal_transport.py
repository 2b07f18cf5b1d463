"""FedOTP: optimal transport between image patches and the texts of a shared and a personal context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
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
    """A frozen dual encoder whose logits are the similarities of patches and texts, weighted by optimal transport.

    Each class has one text per owner: one with the shared context, one with the personal context.

    Attributes:
        mass: Total transported mass.
        smoothing: Weight of the entropy term.
        iterations: Number of Sinkhorn iterations.
    """

    mass: float
    smoothing: float
    iterations: int

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        states = functional.normalize(self.towers.image_features(inputs, patches=True), dim=-1)
        texts = torch.stack([self.towers.text_features(params[f"prompt.text.{owner}"]) for owner in OWNERS])
        texts = functional.normalize(texts, dim=-1)  # (owner, class, feature)
        similarity = torch.einsum("epf,ocf->ecpo", states[:, 1:], texts)  # (example, class, patch, owner)
        # As in the paper, no gradient flows through the transport plan.
        moved = sinkhorn(1 - similarity.detach(), self.mass, self.smoothing, self.iterations)
        return Output(params[SCALE].exp() * (moved * similarity).sum((-1, -2)), states[:, 0])

    def features_to_cache(self, inputs: Tensors) -> torch.Tensor:
        return self.towers.features_to_cache(inputs, patches=True)


def optimal_transport_prompts(
    towers: DualEncoder,
    key: Key,
    *,
    text_tokens: int,
    mass: float,
    smoothing: float,
    iterations: int,
    init_text: str = "",
    context_init: str = "nothing",
) -> OptimalTransportPrompts:
    """Add a shared and a personal context to a dual encoder.

    Args:
        towers: Dual encoder.
        key: Key for the initial values.
        text_tokens: Number of tokens of each context.
        mass: Total transported mass.
        smoothing: Weight of the entropy term.
        iterations: Number of Sinkhorn iterations.
        init_text: Initial text of the contexts.
        context_init: Initial values of the contexts; see `dual_prompts`.

    Raises:
        ModelError: If `text_tokens` is below 1.
    """
    if text_tokens < 1:
        raise ModelError(f"text_tokens is {text_tokens}; set it to 1 or more")
    plain = dual_prompts(
        towers,
        key,
        text_tokens=text_tokens,
        owners=OWNERS,
        fusion="mean",
        init_text=init_text,
        context_init=context_init,
    )
    return OptimalTransportPrompts(towers, plain.name, plain.initial, plain.tags, mass, smoothing, iterations)


def sinkhorn(cost: torch.Tensor, mass: float, smoothing: float, iterations: int) -> torch.Tensor:
    """Compute the entropy-regularized transport plan of minimum cost from patches to texts.

    A patch sends at most 1 / patches. Each text receives exactly mass / texts. The number of iterations is fixed,
    because vmap over clients cannot stop depending on values.

    Args:
        cost: (..., patch, text).
        mass: Total transported mass.
        smoothing: Weight of the entropy term.
        iterations: Number of Sinkhorn iterations.

    Returns:
        The plan, (..., patch, text).
    """
    patches, texts = cost.shape[-2:]
    # Scaling a column does not change the plan. A largest entry of 1 keeps columns from underflowing to 0.
    kernel = ((cost.amin(-2, keepdim=True) - cost) / smoothing).exp()
    row_mass, column_mass = 1 / patches, mass / texts
    left = torch.ones_like(cost[..., 0])  # (..., patch)
    right = torch.ones_like(cost[..., 0, :])  # (..., text)
    for _ in range(iterations):
        left = (row_mass / (kernel @ right.unsqueeze(-1)).squeeze(-1)).clamp(max=1)
        right = column_mass / (kernel.mT @ left.unsqueeze(-1)).squeeze(-1)
    return left.unsqueeze(-1) * kernel * right.unsqueeze(-2)
