"""One client's round against `transformers.Trainer`: the same batches, AdamW, weight decay, warm-up and clipping."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture_fixtures import class_of, make_model
from dropout_fixtures import injected_masks
from helpers import client_batches, final_params, play, toy_run
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from partita.core.data import IGNORE_INDEX, Batch, ClientData
from partita.core.keyed_bits import example_seeds
from partita.core.optim import AdamW, warmup_factor
from partita.core.settings import Run
from partita.methods.fedavg import fedavg

pytest.importorskip("accelerate", reason="transformers.Trainer needs it")
LENGTHS = [3, 5, 9, 4, 6, 3, 2, 8, 7, 5, 2, 10, 3]
WARMUP = 2


class Texts:
    """Texts of different lengths, with the labels that transformers expects and the targets that partita expects."""

    def __init__(self, kind: str) -> None:
        draw = torch.Generator().manual_seed(1)
        self.kind = kind
        self.rows = [torch.randint(2, 19, (length,), generator=draw) for length in LENGTHS]
        if kind == "text":
            self.labels = list(torch.randint(0, 3, (len(LENGTHS),), generator=draw))
        elif kind == "tokens":
            self.labels = [torch.randint(0, 3, (length,), generator=draw) for length in LENGTHS]
            for row in self.labels:
                row[1::3] = IGNORE_INDEX  # later pieces of a word
        else:
            self.labels = self.rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> int:
        return index

    def padded(self, indices: list[int]) -> dict[str, Tensor]:
        """The batch as a collator of transformers makes it."""
        ids = torch.nn.utils.rnn.pad_sequence([self.rows[index] for index in indices], True, 1)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(self.rows[index]) for index in indices], True, 0)
        labels = [self.labels[index] for index in indices]
        stacked = (
            torch.stack(labels)
            if self.kind == "text"
            else torch.nn.utils.rnn.pad_sequence(labels, True, float(IGNORE_INDEX))
        )
        return {"input_ids": ids, "attention_mask": mask, "labels": stacked}

    def take(self, indices: Tensor) -> Batch:
        batch = self.padded(indices.tolist())
        targets = batch.pop("labels")
        if self.kind == "lm":  # the target of a token is the next one
            targets = torch.cat([targets[:, 1:], torch.full((len(targets), 1), IGNORE_INDEX)], 1)
        return Batch(batch, targets)


class OneClient:
    clients = ("a",)

    def __init__(self, kind: str) -> None:
        self.texts = Texts(kind)

    def __getitem__(self, client: str) -> ClientData:
        return ClientData(self.texts, self.texts, self.texts)


class TrainerOnBatches(Trainer):
    """Trainer with given batches, and partita's warm-up instead of transformers', whose first step has a rate of 0."""

    batches: list[list[int]]

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_sampler=self.batches, collate_fn=self.data_collator)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: warmup_factor(step, WARMUP))
        return self.lr_scheduler


def trained_by_trainer(case: str, run: Run, start: Path, population: OneClient, folder: Path, drops: bool) -> Any:
    training, examples = run.training, population.texts
    model = class_of(case).from_pretrained(start, attn_implementation="eager")
    steps = [batch.tolist() for batch in client_batches(run, 0, "a", examples)]
    size = training.batch_size
    if case != "gpt2-lm":
        # Its loss ignores the number of items that Trainer passes. Trainer would add the means of accumulated batches.
        model.accepts_loss_kwargs = False
    trainer = TrainerOnBatches(
        model,
        TrainingArguments(
            str(folder / "trainer"),
            learning_rate=training.lr,
            num_train_epochs=1,
            weight_decay=training.steps_by.weight_decay,  # type: ignore[attr-defined]
            adam_epsilon=training.steps_by.eps,  # type: ignore[attr-defined]
            max_grad_norm=training.clip or 0.0,
            gradient_accumulation_steps=training.accumulate,
            per_device_train_batch_size=size,
            optim="adamw_torch",
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        data_collator=examples.padded,
        train_dataset=examples,
    )
    trainer.batches = [step[at : at + size] for step in steps for at in range(0, len(step), size)]
    key = run.key / "round" / 0 / "client" / "a" / "dropout" / 0
    seeds = [
        part
        for number, step in enumerate(steps)
        for part in example_seeds([key], number, torch.as_tensor(step))[0].split(size)
    ]
    calls = iter(seeds)
    current: list[Tensor] = []
    model.register_forward_pre_hook(lambda *_: current.append(next(calls)))
    if not drops:
        for part in model.modules():
            part.train = lambda mode=True, part=part: part  # type: ignore[assignment]
        model.eval = lambda: model
    with injected_masks(model, lambda: current[-1]) if drops else nullcontext():
        trainer.train()
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("drops", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize(
    ("case", "accumulate"), [("bert-text", 1), ("bert-text", 2), ("bert-tokens", 1), ("gpt2-lm", 1), ("gpt2-lm", 2)]
)
def test_one_client_equals_trainer(
    case: str, drops: bool, accumulate: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = case.partition("-")[2]
    model, population = make_model(case), OneClient(kind)
    model.save_pretrained(model.initial, tmp_path)
    run = toy_run(
        fedavg(), 1, AdamW(weight_decay=0.1, eps=1e-6), lr=1e-2, batch_size=3, accumulate=accumulate, clip=1.0,
        warmup_steps=WARMUP, decay_norms_and_biases=False, dropout=drops,
        loss_average="examples" if kind == "text" else "tokens",
    )  # fmt: skip
    played = play(run, model, population)
    folder = tmp_path / "ours"
    model.save_pretrained(final_params(played), folder)
    ours = dict(class_of(case).from_pretrained(folder).named_parameters())
    theirs = trained_by_trainer(case, run, tmp_path, population, tmp_path, drops)
    start = dict(class_of(case).from_pretrained(tmp_path).named_parameters())
    with torch.no_grad():
        difference = max(float((ours[name] - value).abs().max()) for name, value in theirs.items())
        moved = max(float((start[name] - value).abs().max()) for name, value in theirs.items())
    with capsys.disabled():
        print(f"\n{case}, {'dropout' if drops else 'plain'}, accumulate {accumulate}: {difference:.1e} of {moved:.1e}")
    assert moved > 1e-2
    assert difference < 1e-5
