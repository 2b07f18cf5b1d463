"""Small Trainers of transformers, whose batches come in a fixed order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from partita.core.rng import Key, seeded

SIZES = (9, 7, 12, 5)


class Texts:
    """Texts with one label each."""

    def __init__(self, seed: int = 0, count: int = 9) -> None:
        draw = Key(seed).generator()
        self.ids = torch.randint(2, 20, (count, 6), generator=draw)
        self.labels = torch.randint(0, 2, (count,), generator=draw)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class WordRows(Texts):
    """Texts for language modeling."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def bert(**more: Any) -> BertForSequenceClassification:
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": 72}
    with seeded(Key(7)):
        return BertForSequenceClassification(BertConfig(**{**sizes, **plain, "max_position_embeddings": 16, **more}))


def gpt2() -> GPT2LMHeadModel:
    plain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    with seeded(Key(7)):
        return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=16, **plain))


def arguments(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "trainer"),
        "optim": "sgd",
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 4,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        **more,
    }


def make_trainer(folder: Path, data: Any = None, model: Any = None, evaluates: bool = False, **more: Any) -> Trainer:
    return Trainer(
        bert() if model is None else model,
        TrainingArguments(**arguments(folder, **more)),
        train_dataset=data or Texts(),
        eval_dataset=Texts(99) if evaluates else None,
    )


def values_of(trainer: Trainer) -> dict[str, Tensor]:
    assert trainer.model is not None
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def trained_alone(folder: Path, data: Any = None, model: Any = None, **more: Any) -> dict[str, Tensor]:
    trainer = make_trainer(folder, data, model, **more)
    trainer.train()
    return values_of(trainer)


def clients(folder: Path, count: int = 4, **more: Any) -> dict[str, Trainer]:
    return {
        f"site {place}": make_trainer(folder, Texts(place, size), **more) for place, size in enumerate(SIZES[:count])
    }


def mean_of(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of models, weighted by SIZES."""
    weights = [size / sum(SIZES[: len(parts)]) for size in SIZES[: len(parts)]]
    return {
        name: sum((weight * part[name].double() for weight, part in zip(weights, parts, strict=True)), torch.zeros(()))
        for name in parts[0]
    }
