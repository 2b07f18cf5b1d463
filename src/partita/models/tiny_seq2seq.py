"""A tiny random T5 with a tokenizer of whole words, as a folder: to try things out without a download."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import BertTokenizer, T5Config, T5ForConditionalGeneration

from partita.core.rng import Key, seeded
from partita.models.functional import without_logs
from partita.models.tiny_encoder import SPECIAL


def write_tiny_seq2seq(folder: Path, words: Iterable[str], key: Key, layers: int = 2, width: int = 64) -> None:
    """Write a transformers folder with a random encoder-decoder that knows these words.

    Args:
        folder: Folder to create.
        words: The vocabulary. Other words become the unknown token.
        key: Key for the weights.
        layers: Number of layers of the encoder, and of the decoder.
        width: Hidden size.
    """
    vocabulary = {word: place for place, word in enumerate((*SPECIAL, *sorted(set(words))))}
    # The tokenizer puts [SEP] at the end of every text.
    ends: dict[str, Any] = {"decoder_start_token_id": vocabulary["[PAD]"], "eos_token_id": vocabulary["[SEP]"]}
    config = T5Config(
        vocab_size=len(vocabulary),
        d_model=width,
        d_kv=width // 4,
        d_ff=2 * width,
        num_layers=layers,
        num_heads=4,
        pad_token_id=vocabulary["[PAD]"],
        **ends,
    )
    with without_logs(), seeded(key):
        T5ForConditionalGeneration(config).save_pretrained(folder)
        BertTokenizer(vocab=vocabulary, model_max_length=128, eos_token="[SEP]").save_pretrained(folder)
