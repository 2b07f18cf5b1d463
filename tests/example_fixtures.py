"""Tiny data and models of the kinds that the examples use."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import BertConfig, BertModel, BertTokenizer

from partita.models.functional import without_logs

EXAMPLES = Path(__file__).parent.parent / "examples"
WORDS = ["pain", "in", "the", "left", "arm", "."]


def write_notes(folder: Path) -> Path:
    """Tagged sentences of two hospitals, as described in the example."""
    folder.mkdir()
    rows = [
        {"tokens": WORDS, "tags": ["B-SIGN", "O", "O", "B-PLACE", "I-PLACE", "O"], "hospital": hospital}
        for hospital in ("north", "south") * 20
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_encoder(folder: Path) -> Path:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    tokenizer = BertTokenizer(vocab={word: place for place, word in enumerate(vocabulary)})
    shape = {"hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 8}
    with without_logs():
        BertModel(BertConfig(**shape, vocab_size=len(vocabulary))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
