"""FedPGP: a shared context plus a local low-rank one; a contrastive loss pulls the shared one to handwritten texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from partita.core.client_rule import ClientRule, Context
from partita.core.data import Batch
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Output
from partita.core.options import Count, NotNegative, Positive, Text
from partita.core.tensors import Tensors
from partita.methods.promptfl import share_global


@dataclass(frozen=True)
class TextContrast(ClientRule):
    """Contrastive loss per class: -log(p / (p + n)).

    Here p = exp(sim(shared, written) / T) and n = exp(sim(shared, own) / T).

    Attributes:
        mu: The weight of the loss.
        temperature: The temperature T.
    """

    mu: float
    temperature: float
    per_example = True

    def penalty(self, out: Output, params: Tensors, batch: Batch, ctx: Context) -> torch.Tensor | None:
        texts = getattr(out, "texts", None)
        if texts is None:
            raise MethodError(f"fedpgp compares texts, and {ctx.model.name} gives none; use a model 'clip'")
        own, shared, written = texts()  # (class, feature)
        near, far = (torch.nn.functional.cosine_similarity(shared, other) for other in (written, own))  # (class,)
        return self.mu * torch.nn.functional.softplus((far - near) / self.temperature).mean()


def fedpgp(
    text_tokens: Count = 16,
    rank: Count = 4,
    mu: NotNegative = 1.0,
    temperature: Positive = 0.5,
    init_text: Text = "",
    context_init: Literal["nothing", "tokens"] = "nothing",
) -> Method:
    """Build FedPGP.

    Args:
        text_tokens: Number of context tokens.
        rank: Rank of the local context.
        mu: Weight of the contrastive loss. 0: the texts it needs are not read.
        temperature: Temperature T of the contrastive loss.
        init_text: Initial text of the last tokens of the shared context; the other tokens are random.
        context_init: Initial values of the shared context. "tokens": at the scale of the token embeddings.

    Raises:
        MethodError: If `mu` is below 0 or `temperature` is not above 0.
    """
    if mu < 0 or temperature <= 0:
        raise MethodError(f"method.mu is {mu} and method.temperature {temperature}; give 0 or more, and more than 0")
    return Method(
        "fedpgp",
        plan=share_global,
        client_rules=(TextContrast(mu, temperature),) if mu else (),
        carry_optimizer=True,
        extend=lambda model, key: model.prompted(
            "low-rank", key, text_tokens=text_tokens, rank=rank, init_text=init_text, context_init=context_init
        ),
    )
