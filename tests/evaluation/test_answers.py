"""Scores of answers: loss per token, exact match of generated answers, and multiple choice by likelihood."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_fixtures import QUESTIONS, ROWS, write_decoder, write_rows
from torch import Tensor
from torch.nn import functional

from partita import data, models
from partita.core.data import IGNORE_INDEX
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.data.task import Subset, Task
from partita.evaluation import score
from partita.evaluation.answers import Answers, Choices, last_answers, with_generation
from partita.evaluation.evaluator import EvaluationError
from partita.evaluation.metrics import NextToken
from partita.models.functional import FunctionalModel
from partita.tasks import CHAT, CHOICE


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("models") / request.param, request.param)


def built(folder: Path, tmp_path: Path, rows: list[dict[str, Any]], **options: Any) -> tuple[Task, FunctionalModel]:
    path = write_rows(tmp_path / "train.jsonl", rows)
    task = data.load("chat", Key(0), path=str(path), tokenizer=str(folder), **{"max_length": 64, **options})
    model = models.build("pretrained", task, Key(2), path=str(folder))
    assert isinstance(model, FunctionalModel)
    return task, model


HALFWAY = 40  # steps after which a model has learned some of the answers


def log_shares(model: FunctionalModel, ids: list[int]) -> Tensor:
    """Return the log-probabilities of the next token, (token, vocabulary), of one text without padding."""
    return model(model.initial, {"input_ids": torch.tensor([ids])}).logits[0].log_softmax(-1)


def rows_of(table: Any) -> list[tuple[list[int], list[int]]]:
    """Return the tokens and targets of each example, without padding."""
    found = []
    for place in range(len(table)):
        batch = table.take(torch.tensor([place]))
        real = batch.inputs["attention_mask"][0].bool()
        found.append((batch.inputs["input_ids"][0][real].tolist(), batch.targets[0][real].tolist()))
    return found


@pytest.mark.fast_cases(1)
def test_the_loss_is_a_mean_over_the_tokens_of_answers(folder: Path, tmp_path: Path) -> None:
    task, model = built(folder, tmp_path, ROWS)
    losses = []
    for ids, targets in rows_of(task.test):
        shares = log_shares(model, ids)
        losses += [-float(shares[place, target]) for place, target in enumerate(targets) if target != IGNORE_INDEX]
    found = score(model, model.initial, task.test, CHAT.evaluator(()))
    mean = sum(losses) / len(losses)
    assert found == pytest.approx({"loss": mean, "perplexity": math.exp(mean), "exact_match": 0.0}, rel=1e-5)


@pytest.mark.fast_cases(1)
def test_prompts_end_where_the_last_answer_starts(folder: Path, tmp_path: Path) -> None:
    task, _ = built(folder, tmp_path, ROWS)
    batch = task.test.take(torch.arange(len(task.test)))
    prompts, answers = last_answers(batch.inputs, batch.targets)
    for place, (ids, targets) in enumerate(rows_of(task.test)):
        answer = [target for target in targets if target != IGNORE_INDEX][-3:]  # "NUMBER . [SEP]"
        real = prompts["attention_mask"][place].bool()
        assert prompts["input_ids"][place][real].tolist() == ids[: len(ids) - 2]
        assert not real[: -int(real.sum())].any()  # padding is at the start
        assert [token for token in answers[place].tolist() if token != IGNORE_INDEX] == answer


@pytest.mark.fast_cases(1)
def test_generated_answers_are_the_most_probable_tokens(folder: Path, tmp_path: Path) -> None:
    task, model = built(folder, tmp_path, ROWS)
    special = set(task.tokenizer.all_special_ids)
    batch = task.test.take(torch.arange(len(task.test)))
    prompts, _ = last_answers(batch.inputs, batch.targets)
    generated = model.generate(model.initial, prompts, 5)
    lengths = set()
    for place, text in enumerate(generated):
        ids = prompts["input_ids"][place][prompts["attention_mask"][place].bool()].tolist()
        lengths.add(len(ids))
        written: list[int] = []
        while len(written) < 5 and not special.intersection(written):
            written.append(int(log_shares(model, ids + written)[-1].argmax()))
        assert text == task.tokenizer.decode(written, skip_special_tokens=True)
    assert len(lengths) > 1


@pytest.mark.slow
def test_exact_match_is_that_of_generated_answers(folder: Path, tmp_path: Path) -> None:
    task, model = built(folder, tmp_path, ROWS)
    batch = task.train.take(torch.arange(len(task.train)))
    params = {name: value.clone().requires_grad_() for name, value in model.initial.items()}
    optimizer = torch.optim.Adam(params.values(), lr=1e-2)
    halfway: Tensors = {}
    for step in range(120):
        if step == HALFWAY:
            halfway = {name: value.detach().clone() for name, value in params.items()}
        optimizer.zero_grad()
        model.losses(model(params, batch.inputs), batch.targets).mean().backward()
        optimizer.step()
    learned = {name: value.detach() for name, value in params.items()}
    for each in (learned, halfway):
        found = score(model, each, task.train, Answers())["exact_match"]
        prompts, answers = last_answers(batch.inputs, batch.targets)
        texts, wanted = model.generate(each, prompts, 6), model.decode(answers)
        assert found == sum(text.strip() == right.strip() for text, right in zip(texts, wanted, strict=True)) / len(
            texts
        )
    assert score(model, learned, task.train, Answers())["exact_match"] == 1.0
    assert 0 < score(model, halfway, task.train, Answers())["exact_match"] < 1
    assert score(model, model.initial, task.train, Answers())["exact_match"] == 0.0


@pytest.mark.fast_cases(1)
def test_choices_by_their_likelihoods(folder: Path, tmp_path: Path) -> None:
    # Right answers and wrong ones of different lengths, so that normalization matters.
    rows = [
        {**row, "choices": [*row["choices"][:3], "two . three . four"][: 2 + n % 3], "answer": n % 2}
        for n, row in enumerate(QUESTIONS)
    ]
    task, model = built(folder, tmp_path, rows, choices="choices")
    by_sum, by_mean = 0, 0
    table: Any = task.train
    for place in range(len(table)):
        batch, [count], [right] = table.take_choices(torch.tensor([place]))
        sums, means = [], []
        for row in range(int(count)):
            real = batch.inputs["attention_mask"][row].bool()
            ids, targets = batch.inputs["input_ids"][row][real], batch.targets[row][real]
            own = -functional.cross_entropy(
                log_shares(model, ids.tolist()), targets, ignore_index=IGNORE_INDEX, reduction="sum"
            )
            sums.append(float(own))
            means.append(float(own) / int((targets != IGNORE_INDEX).sum()))
        by_sum += sums.index(max(sums)) == int(right)
        by_mean += means.index(max(means)) == int(right)
    found = score(model, model.initial, table, CHOICE.evaluator(()))
    assert (found["accuracy"], found["normalized_accuracy"]) == (by_sum / len(table), by_mean / len(table))
    assert {"loss", "perplexity"} < found.keys()
    half = Subset(table, torch.arange(0, len(table), 2))  # as a client's own test set
    assert 0 <= score(model, model.initial, half, Choices())["accuracy"] <= 1


def test_settings_of_generation() -> None:
    assert with_generation(Answers(), 9, None) == Answers()
    for evaluator in (NextToken(), Choices(), Answers()):
        with pytest.raises(
            EvaluationError, match=r"needs no generated text for its scores; remove it, or use data\.name"
        ):
            with_generation(evaluator, None, 5)
