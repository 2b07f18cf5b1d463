"""Scores of generated texts: how many are generated, and what they are compared with."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from partita.core.model import Model, Output, TagError
from partita.core.tensors import Tensors
from partita.data import Table
from partita.evaluation import evaluate
from partita.evaluation.answers import with_generation
from partita.evaluation.evaluator import EvaluationError
from partita.evaluation.generation import GeneratedText, ModelPredictions
from partita.evaluation.metrics import NextToken
from partita.testing.toy import ToyTransformer

pytest.importorskip("rouge_score")

PARAMS = {"w": torch.zeros(1)}
WORDS = ("", "the", "cat", "sat", "on", "mat", "dog")


class Writer:
    """Writes the words that its input names, one per token."""

    name = "writer"

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        return Output(torch.zeros(*inputs["input_ids"].shape, len(WORDS)))

    def losses(self, out: Output, targets: Tensor) -> Tensor:
        return torch.arange(len(targets)).double() + 1

    def generate(self, params: Tensors, inputs: Tensors, max_new_tokens: int) -> list[str]:
        self.asked.append((len(inputs["input_ids"]), max_new_tokens))
        return self.decode(inputs["input_ids"][:, :max_new_tokens])

    def decode(self, tokens: Tensor) -> list[str]:
        return [" ".join(WORDS[token] for token in row if token > 0) for row in tokens.tolist()]


def table(rows: list[list[int]], targets: list[list[int]]) -> Table:
    ids = torch.tensor(rows)
    return Table({"input_ids": ids, "decoder_input_ids": ids}, torch.tensor(targets))


THREE = table([[1, 2, 3], [1, 6, 3], [4, 5, 0]], [[1, 2, 3], [1, 2, 3], [4, 5, -100]])


def scores(evaluator: GeneratedText, examples: Table = THREE, model: Any = None) -> dict[str, float]:
    return evaluate(cast(Model, model or Writer()), PARAMS, examples, evaluator).scores


@pytest.mark.slow
def test_scores_by_hand() -> None:
    found = scores(GeneratedText())
    loss = (3 * 1 + 3 * 2 + 2 * 3) / 8
    assert found == pytest.approx(
        {
            "rouge1": (1 + 2 / 3 + 1) / 3,
            "rouge2": (1 + 0 + 1) / 3,
            "rougeL": (1 + 2 / 3 + 1) / 3,
            "exact_match": 2 / 3,
            "loss": loss,
            "perplexity": math.exp(loss),
        }
    )


@pytest.mark.slow
def test_texts_are_generated_for_the_first_examples_only_and_the_loss_is_over_all() -> None:
    rows = [[1 + number % 6] for number in range(40)]
    examples, writer = table(rows, rows), Writer()
    few = scores(GeneratedText(max_new_tokens=7, examples=20), examples, writer)
    assert writer.asked == [(16, 7), (4, 7)], "batches of 16"
    assert few["exact_match"] == 1.0
    assert few["loss"] == scores(GeneratedText(), examples)["loss"]


def test_max_new_tokens_shortens_the_texts() -> None:
    assert scores(GeneratedText(max_new_tokens=1))["exact_match"] == 0.0


def test_texts_without_latin_words_have_no_rouge() -> None:
    def found(texts: list[str], truths: list[str]) -> dict[str, float]:
        count = len(texts)
        targets, losses = torch.ones(count, 1, dtype=torch.long), torch.ones(count)
        batch = ModelPredictions(
            torch.zeros(count, 1, 2),
            targets,
            losses,
            lambda first, most: (texts, truths),
            lambda: None,  # type: ignore[arg-type, return-value]
        )
        return GeneratedText()(iter([batch]))

    assert found(["猫"], ["猫"]).keys() == {"exact_match", "loss", "perplexity"}
    assert found(["", "cat"], ["猫", "cat"])["rouge1"] == 0.5


def test_settings_reach_the_evaluator_and_are_refused_for_other_tasks() -> None:
    assert with_generation(GeneratedText(), 9, None) == GeneratedText(9, None)
    assert with_generation(GeneratedText(), None, 5) == GeneratedText(64, 5)
    assert with_generation(NextToken(), None, None) == NextToken()
    for settings, key in (((9, None), "max_new_tokens"), ((None, 5), "generate_examples")):
        with pytest.raises(EvaluationError, match=rf"evaluate\.{key} is set, but this task needs no generated text"):
            with_generation(NextToken(), *settings)


def test_missing_package_is_reported_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.evaluation.generation.find_spec", lambda name: None)
    for start in (lambda: with_generation(GeneratedText(), None, None), lambda: scores(GeneratedText())):
        with pytest.raises(EvaluationError, match=r"need the package 'rouge-score': pip install 'partita\[text\]'"):
            start()


def test_a_model_without_texts_says_so() -> None:
    model = ToyTransformer()
    with pytest.raises(TagError, match="cannot generate text; use a Hugging Face model such as T5 or BART"):
        model.generate(model.initial, {}, 5)
    with pytest.raises(TagError, match="has no tokenizer"):
        model.decode(torch.zeros(1, 1))
