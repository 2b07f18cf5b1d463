"""Generation of texts by an encoder-decoder of transformers, for evaluation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from partita.core.data import IGNORE_INDEX
from partita.core.tensors import Tensors
from partita.models import ModelError
from partita.models.adapter import FunctionalModel, without_logs

ENCODER_INPUTS = ("input_ids", "attention_mask")  # the decoder's inputs hold the answer, which generation must not see


@torch.inference_mode()
def generate(model: FunctionalModel, params: Tensors, inputs: Tensors, max_new_tokens: int) -> list[str]:
    """Generate texts greedily. Everything else is as the model's own generation config says.

    Args:
        model: The model.
        params: All its parameters.
        inputs: The inputs of a batch.
        max_new_tokens: Maximum number of tokens of a text.

    Raises:
        ModelError: If the model is no encoder-decoder, or has no tokenizer.
    """
    if model.kind.head != "seq2seq":
        raise ModelError(f"{model.name} has a head for '{model.kind.head}' and generates no text; use 'seq2seq' data")
    given = {name: inputs[name] for name in ENCODER_INPUTS}
    with model.installed(params), without_logs():
        module: Any = model.module  # transformers has no type for it
        tokens = module.generate(**given, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1)
    return decode(model, tokens)


def decode(model: FunctionalModel, tokens: Tensor) -> list[str]:
    """Return the texts of token ids, (example, token), without special tokens. Ignored targets are padding.

    Raises:
        ModelError: If the model has no tokenizer.
    """
    if model.processor is None:
        raise ModelError(f"{model.name} has no tokenizer to turn tokens into text; use a task with a tokenizer")
    rows = [[token for token in row if token != IGNORE_INDEX] for row in tokens.tolist()]
    texts: list[str] = model.processor.batch_decode(rows, skip_special_tokens=True)
    return texts
