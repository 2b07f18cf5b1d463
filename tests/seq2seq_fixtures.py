"""Tiny encoder-decoders, and texts for them: digits, and the words for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from partita.core.rng import Key, seeded
from partita.models.functional import without_logs
from partita.models.tiny_encoder import SPECIAL
from partita.models.tiny_seq2seq import write_tiny_seq2seq

DIGITS = ("one", "two", "three", "four", "five")
VOCABULARY = (*DIGITS, *"12345")
ROWS: list[dict[str, Any]] = [
    {
        "source": " ".join(str(1 + (number * step) % 5) for step in range(1, 3 + number % 3)),
        "target": " ".join(DIGITS[(number * step) % 5] for step in range(1, 3 + number % 3)),
        "site": f"s{number % 3}",
    }
    for number in range(30)
]


def write_t5(folder: Path) -> None:
    """Write a tiny T5."""
    write_tiny_seq2seq(folder, VOCABULARY, Key(0), layers=1, width=16)


def write_bart(folder: Path) -> None:
    """Write a tiny BART."""
    from transformers import BartConfig, BartForConditionalGeneration, BertTokenizer

    vocabulary = {word: place for place, word in enumerate((*SPECIAL, *VOCABULARY))}
    end = vocabulary["[SEP]"]
    tokens = {"pad_token_id": 0, "bos_token_id": vocabulary["[CLS]"], "eos_token_id": end}
    tokens |= {"decoder_start_token_id": end, "forced_eos_token_id": end}
    sizes = {f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in SIZES.items()}
    config = BartConfig(vocab_size=len(vocabulary), d_model=16, max_position_embeddings=32, **sizes, **tokens)
    with without_logs(), seeded(Key(0)):
        BartForConditionalGeneration(config).save_pretrained(folder)
        BertTokenizer(vocab=vocabulary, model_max_length=32, eos_token="[SEP]").save_pretrained(folder)


SIZES = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}
