"""Small LLaMA folders, and models of them with a frozen base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from partita.core import tensors
from partita.core.rng import Key, seeded
from partita.models.functional import FunctionalModel
from partita.models.pretrained import pretrained
from partita.models.without_weights import AnyTask
from partita.tasks import LM, TaskKind

KEY = Key(5)
LLAMA = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4} | {
    "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 16
}  # fmt: skip
WORDS = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 8]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}


def save_llama(folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> str:
    with seeded(KEY):
        LlamaForCausalLM(LlamaConfig(**{**LLAMA, **more})).to(dtype).save_pretrained(folder)
    return str(folder)


def load(path: str, kind: TaskKind = LM, **options: Any) -> FunctionalModel:
    return pretrained(AnyTask(kind, max_tokens=3), KEY, path=path, **options)


def frozen_weights(model: FunctionalModel) -> tensors.Tensors:
    held = dict(model.module.named_parameters())
    return {name: held[name].data for name in model.frozen_tags}
