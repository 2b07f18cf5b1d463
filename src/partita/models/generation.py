"""Generation of texts by a model of transformers, for evaluation."""

from __future__ import annotations

from typing import Any

import torch

from partita.core.data import IGNORE_INDEX
from partita.core.tensors import Tensors
from partita.models import ModelError
from partita.models.functional import FunctionalModel, without_logs

READ = ("input_ids", "attention_mask")  # a decoder's other inputs hold the answer, which generation must not see
WRITERS = ("seq2seq", "lm")  # heads that predict the next token


@torch.inference_mode()
def generate(model: FunctionalModel, params: Tensors, inputs: Tensors, max_new_tokens: int) -> list[str]:
    """Generate texts greedily. Everything else is as the model's own generation config says.

    A text of a model without an encoder goes on after the inputs, and ends with the first special token, because chat
    templates end an answer with special tokens of their own.

    Args:
        model: The model.
        params: All its parameters.
        inputs: The inputs of a batch. If the model has no encoder, they are padded at the start.
        max_new_tokens: Maximum number of tokens of a text.

    Raises:
        ModelError: If the model generates no text, or has no tokenizer.
    """
    if model.kind.head not in WRITERS:
        raise ModelError(
            f"{model.name} has a head for '{model.kind.head}' and generates no text; use 'chat' or 'seq2seq' data"
        )
    given = {name: inputs[name] for name in READ}
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "num_beams": 1}
    read = 0
    if model.kind.head == "lm":
        read = given["input_ids"].shape[1]
        options |= {"eos_token_id": special_tokens(model), "pad_token_id": special_tokens(model)[0]}
    with model.installed(params), without_logs():
        module: Any = model.module  # transformers has no type for it
        tokens = module.generate(**given, **options)
    return decode(model, tokens[:, read:])


def special_tokens(model: FunctionalModel) -> list[int]:
    """Return the special tokens of the model's tokenizer.

    Raises:
        ModelError: If there are none, so that no text would end.
    """
    tokenizer = _tokenizer(model)
    added = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    found = sorted({*added, *tokenizer.all_special_ids})
    if not found:
        raise ModelError(f"the tokenizer of {model.name} has no special token with which a text could end; set one")
    return found


def decode(model: FunctionalModel, tokens: torch.Tensor) -> list[str]:
    """Return the texts of token ids, (example, token), without special tokens. Ignored targets are padding.

    Raises:
        ModelError: If the model has no tokenizer.
    """
    rows = [[token for token in row if token != IGNORE_INDEX] for row in tokens.tolist()]
    texts: list[str] = _tokenizer(model).batch_decode(rows, skip_special_tokens=True)
    return texts


def _tokenizer(model: FunctionalModel) -> Any:
    if model.processor is None:
        raise ModelError(f"{model.name} has no tokenizer to turn tokens into text; use a task with a tokenizer")
    return model.processor
