"""A file that calls `fit`, as a user runs it on a laptop."""

from __future__ import annotations

from pathlib import Path

import datasets  # noqa: F401  what the file imports counts as collection, and not as a test
import transformers.models.bert.modeling_bert  # noqa: F401

FILE = '''"""Reviews of three hospitals."""

import json
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

import partita as pt

WORDS = ["good", "bad", "great", "awful", "fine", "poor", "film", "was", "it", "and"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]

rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
tokenizer = BertTokenizer(vocab={word: place for place, word in enumerate(VOCABULARY)}, model_max_length=16)
data = pt.from_dataset(rows, text="review", label="stars", tokenizer=tokenizer).by("hospital")

torch.manual_seed(0)
shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
model = BertForSequenceClassification(BertConfig(**shape, vocab_size=15, num_labels=3))

if __name__ == "__main__":
    run = pt.fit(model, data, "fedavg", rounds=2, lr=0.05, optimizer="sgd", batch_size=8, progress=False)
    print(run.scores)
'''
LINES = "".join(
    f'{{"review": "{word} film and {other} {place % 7}", "stars": {1 + place % 3}, "hospital": "c{place // 3 % 3}"}}\n'
    for place, (word, other) in enumerate([("good", "it"), ("bad", "was"), ("fine", "great"), ("poor", "awful")] * 12)
)


def write_file(folder: Path, text: str = FILE, rows: str = LINES) -> Path:
    """Write the file and its rows; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text(rows)
    (folder / "federation.py").write_text(text)
    return folder / "federation.py"
