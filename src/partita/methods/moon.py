"""MOON: pull a client's features to those of the received model, away from those of its own previous model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from partita.core.client_rule import ClientRule, Context
from partita.core.data import Batch
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Output
from partita.core.options import NotNegative, Positive
from partita.core.tensors import Slots, Tensors, select


@dataclass(frozen=True)
class MoonClient(ClientRule):
    """Contrastive loss -log(p / (p + n)), computed as a softplus of the difference of similarities.

    Here p = exp(sim(z, z_sent) / T) and n = exp(sim(z, z_last) / T).

    Attributes:
        mu: The weight of the loss.
        temperature: The temperature T.
    """

    mu: float
    temperature: float
    per_example = True
    slots = frozenset({"last"})

    def memory(self, anchor: Tensors) -> Slots:
        return {"last": anchor}

    def penalty(self, out: Output, params: Tensors, batch: Batch, ctx: Context) -> torch.Tensor | None:
        own, others = _features(ctx, out), (ctx.anchor, {**ctx.anchor, **ctx.memory["last"]})
        sent, last = (_features(ctx, ctx.model(other, batch.inputs)) for other in others)  # (example, width)
        near, far = (torch.nn.functional.cosine_similarity(own, other) for other in (sent, last))  # (example,)
        losses = torch.nn.functional.softplus((far - near) / self.temperature)
        return self.mu * (losses.mean() if batch.mask is None else (losses * batch.mask).sum() / batch.mask.sum())

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        return {}, {"last": select(params, ctx.plan.train)}


def _features(ctx: Context, out: Output) -> torch.Tensor:
    if out.features is None:
        raise MethodError(f"moon compares features, and {ctx.model.name} gives none; use another model")
    return out.features


def moon(mu: NotNegative = 1.0, temperature: Positive = 0.5) -> Method:
    """Build MOON with a contrastive loss of weight `mu` and the given temperature.

    Raises:
        MethodError: If `mu` is below 0 or `temperature` is not above 0.
    """
    if mu < 0 or temperature <= 0:
        raise MethodError(f"method.mu is {mu} and method.temperature {temperature}; give 0 or more, and more than 0")
    return Method("moon", client_rules=(MoonClient(mu, temperature),))
