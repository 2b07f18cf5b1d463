"""FedPGP's context: a shared context plus a low-rank personal context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from partita.core.model import Output
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.models import ModelError
from partita.models.prompts.dual_encoder import DualEncoder
from partita.models.prompts.prompts import PromptModel, dual_prompts, random_prompts

SHARED, LEFT, RIGHT = "prompt.text.global", "prompt.text.left", "prompt.text.right"


@dataclass(frozen=True)
class WithTexts(Output):
    """Model output with text features on demand.

    `texts` returns three (class, feature) tensors: with the client's context, with the shared context, and with the
    template.
    """

    texts: Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None


@dataclass(frozen=True, eq=False)
class LowRankPrompts(PromptModel):
    """A frozen dual encoder with the context shared + left @ right."""

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        own = self.towers.text_features(params[SHARED] + params[LEFT] @ params[RIGHT])
        out = self.towers.compare(params, self.towers.image_features(inputs)[:, 0], own)

        def texts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return own, self.towers.text_features(params[SHARED]), self.towers.precomputed["texts"]

        return WithTexts(out.logits, out.features, texts)


def low_rank_prompts(
    towers: DualEncoder, key: Key, *, text_tokens: int, rank: int, init_text: str = "", context_init: str = "nothing"
) -> LowRankPrompts:
    """Add a shared context and a low-rank personal context to a dual encoder.

    Args:
        towers: Dual encoder.
        key: Key for the initial values.
        text_tokens: Number of context tokens.
        rank: Rank of the personal context.
        init_text: Initial text of the shared context.
        context_init: Initial values of the shared context; see `dual_prompts`.

    Raises:
        ModelError: If the rank does not fit.
    """
    width = towers.width("text")
    if not 1 <= rank <= min(text_tokens, width):
        raise ModelError(
            f"rank is {rank}, but a context is {text_tokens} x {width}; use a rank from 1 to {min(text_tokens, width)}"
        )
    plain = dual_prompts(towers, key, text_tokens=text_tokens, init_text=init_text, context_init=context_init)
    initial, tags = dict(plain.initial), dict(plain.tags)
    for name, shape in (LEFT, (text_tokens, rank)), (RIGHT, (rank, width)):
        initial[name] = random_prompts(key / name, *shape)
        tags[name] = frozenset({"prompt", "local", "text"})
    return LowRankPrompts(towers, plain.name, initial, tags)
