"""Tiny models and batches for ghost clipping."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from partita.core.data import Batch, ClientData
from partita.core.rng import Key, seeded
from partita.models.functional import FunctionalModel
from partita.models.hugging_face import from_module

SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12, "num_labels": 3}
WORDS = {**SIZES, "vocab_size": 20, "max_position_embeddings": 16, "pad_token_id": 0}
KINDS: dict[str, Any] = {
    "ViT": ("ViTForImageClassification", {**SIZES, "image_size": 8, "patch_size": 4, "num_channels": 1}),
    "Bert": ("BertForSequenceClassification", WORDS),
    "Llama": ("LlamaForSequenceClassification", {**WORDS, "num_key_value_heads": 1}),
}


def tiny_model(kind: str, frozen: tuple[str, ...] = ("embedding",)) -> FunctionalModel:
    name, sizes = KINDS[kind]
    with seeded(Key(0)):
        module = getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**sizes))
    return from_module(kind.lower(), module, frozen)


def tiny_batch(kind: str, count: int = 5) -> Batch:
    draw = torch.Generator().manual_seed(3)
    targets = torch.randint(0, 3, (count,), generator=draw)
    if kind == "ViT":
        return Batch({"pixel_values": torch.randn(count, 1, 8, 8, generator=draw)}, targets)
    lengths = torch.randint(2, 8, (count, 1), generator=draw)
    seen = torch.arange(7) < lengths
    tokens = torch.randint(1, 20, (count, 7), generator=draw).where(seen, 0)
    return Batch({"input_ids": tokens, "attention_mask": seen.long()}, targets)


class TextClients:
    """Two clients with the same six texts."""

    clients = ("a", "b")

    def __getitem__(self, client: str) -> ClientData:
        batch = tiny_batch("Bert", 6)

        class Part:
            def __len__(self) -> int:
                return 6

            def take(self, indices: Tensor) -> Batch:
                return Batch({name: value[indices] for name, value in batch.inputs.items()}, batch.targets[indices])

        return ClientData(Part(), Part(), Part())
