"""pFedPrompt: clients jointly learn a context; at the test, each also compares an image with its own labeled images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from partita.core.client_rule import ClientRule, Context
from partita.core.data import Examples
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.options import Count, NotNegative, Positive, Text
from partita.core.rng import Key
from partita.core.tensors import Slots, Tensors, to
from partita.methods.promptfl import share_global

CACHE = "cache.keys"  # (class, shot, feature)
ROWS_TOGETHER = 32  # images read together


@dataclass(frozen=True)
class FillCache(ClientRule):
    """Fills a client's cache with features of its own images in the client's first round. It then stays as it is."""

    uses_data = True

    def start(self, params: Tensors, examples: Examples, ctx: Context, key: Key) -> tuple[Tensors, Slots]:
        if CACHE not in ctx.plan.train or params[CACHE].any():
            return {}, {}
        keys = torch.zeros_like(params[CACHE])
        filled = [0] * len(keys)  # per class
        for rows in torch.split((key / "shots").permutation(len(examples)), ROWS_TOGETHER):
            batch = examples.take(rows)
            places: list[tuple[int, int, int]] = []  # of the image in the batch, and of its key in the cache
            for row, label in enumerate(batch.targets.tolist()):
                if filled[label] < keys.shape[1]:
                    places.append((row, label, filled[label]))
                    filled[label] += 1
            if places:
                chosen, labels, shots = (torch.tensor(each) for each in zip(*places, strict=True))
                inputs = {name: value[chosen.to(value.device)] for name, value in batch.inputs.items()}
                with torch.no_grad():
                    found = ctx.model(params, to(inputs, keys.device)).features  # (example, feature), normalized
                assert found is not None
                keys[labels.to(keys.device), shots.to(keys.device)] = found.to(keys.dtype)
            if min(filled) == keys.shape[1]:
                break
        return {CACHE: keys}, {}


def pfedprompt(
    text_tokens: Count = 16,
    shots: Count = 16,
    alpha: NotNegative = 1.0,
    beta: Positive = 5.5,
    init_text: Text = "",
    context_init: Literal["nothing", "tokens"] = "nothing",
) -> Method:
    """Build pFedPrompt.

    Args:
        text_tokens: Number of learned context tokens.
        shots: Images of each class in a client's cache. A client with fewer puts in all of them.
        alpha: Weight of the cache in a client's predictions. 0: those of the context alone.
        beta: Sharpness of the similarity to the images in the cache.
        init_text: Initial text of the last context tokens, such as "a photo of a"; the other tokens are random.
        context_init: Initial values of the context. "tokens": at the scale of the token embeddings.

    Raises:
        MethodError: If `alpha` is below 0 or `beta` is not above 0.
    """
    if alpha < 0 or beta <= 0:
        raise MethodError(f"method.alpha is {alpha} and method.beta {beta}; give 0 or more, and more than 0")
    options = {"text_tokens": text_tokens, "shots": shots, "alpha": alpha, "beta": beta}
    return Method(
        "pfedprompt",
        plan=share_global,
        client_rules=(FillCache(),),
        carry_optimizer=True,
        extend=lambda model, key: model.prompted(
            "cache", key, **options, init_text=init_text, context_init=context_init
        ),
    )
