"""Files with Trainers that are configs for sites: each site reads its own rows with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer

import partita
from partita.core.own_code import Reference, load_module

SITES = ("north", "south", "west")
HEAD = '''"""Texts of three hospitals."""

import json
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import partita


def make(file="rows.jsonl"):
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()] if Path(file).exists() else []
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    plain = {"intermediate_size": 8, "max_position_embeddings": 8}
    model = BertForSequenceClassification(BertConfig(**sizes, **plain))
    args = TrainingArguments(
        "out", save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, learning_rate=0.01,
        per_device_train_batch_size=4, num_train_epochs=1,
    )
    return Trainer(model, args, train_dataset=rows, eval_dataset=rows or None)


def score(module):
    return {"norm": float(module.classifier.weight.norm()), "loss": 0.5}


'''
PATCH = (
    HEAD
    + """trainer = make()

if __name__ == "__main__":
    client = partita.patch(trainer, "fedavg", rounds=2, clients=["north", "south", "west"])
    while client.round():
        trainer.train()
"""
)
FEDERATE = (
    HEAD
    + """trainers = {name: lambda name=name: make(f"{name}.jsonl") for name in ["north", "south", "west"]}

if __name__ == "__main__":
    run = partita.federate(trainers, "fedavg", rounds=2)
"""
)


def write_rows(file: Path, site: str) -> None:
    """Write the rows of a site."""
    place = SITES.index(site)
    rows = [
        f'{{"input_ids": [{", ".join(str(1 + (3 * number + place * digit) % 19) for digit in range(5))}], '
        f'"labels": {(number + place) % 2}}}\n'
        for number in range(6 + 3 * place)
    ]
    file.write_text("".join(rows))


def write_party(folder: Path, text: str = PATCH, site: str = "") -> Path:
    """Write the folder of a party, with the rows of a site; the server has none. Return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "federation.py").write_text(text)
    if site:
        write_rows(folder / "rows.jsonl", site)
    return folder / "federation.py"


def federated(folder: Path, method: Any = "fedavg", rounds: int = 2, **more: Any) -> dict[str, Trainer]:
    """Train the three Trainers in one process, in `folder/run`, and return them."""
    file = write_party(folder)
    make = load_module(Reference(str(file), "make")).make
    for site in SITES:
        write_rows(folder / f"{site}.jsonl", site)
    trainers = {site: make(folder / f"{site}.jsonl") for site in SITES}
    partita.federate(trainers, method, rounds=rounds, folder=folder / "run", **more)
    return trainers
