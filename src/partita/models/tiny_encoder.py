"""A tiny random BERT with a tokenizer of whole words, as a folder: to try things out without a download."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformers import BertConfig, BertModel, BertTokenizer

from partita.core.rng import Key, seeded
from partita.models.functional import without_logs

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_tiny_encoder(folder: Path, words: Iterable[str], key: Key, layers: int = 4, width: int = 32) -> None:
    """Write a transformers folder with a random model that knows these words.

    Args:
        folder: Folder to create.
        words: The vocabulary. Other words become the unknown token.
        key: Key for the weights.
        layers: Number of layers.
        width: Hidden size.
    """
    vocabulary = {word: place for place, word in enumerate((*SPECIAL, *sorted(set(words))))}
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * width,
        max_position_embeddings=128,
    )
    with without_logs(), seeded(key):
        BertModel(config).save_pretrained(folder)
        BertTokenizer(vocab=vocabulary, model_max_length=128).save_pretrained(folder)
