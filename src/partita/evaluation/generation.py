"""Scores of generated texts: ROUGE and exact match, beside the loss per token. rouge-score is imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

import numpy as np
import torch

from partita.evaluation.bootstrap import Floats
from partita.evaluation.by_example import Kept
from partita.evaluation.evaluator import EvaluationError, Predictions
from partita.evaluation.metrics import LOSS, PERPLEXITY, NextToken
from partita.evaluation.outcomes import Totals
from partita.record.metric import Metric

ROUGE = ("rouge1", "rouge2", "rougeL")
WORDS = "words"  # the number of words of a target that ROUGE compares
TEXT_SCORES = (*ROUGE, WORDS, "exact_match")
ROUGE_L = Metric("rougeL")
EXACT_MATCH = Metric("exact_match")


@dataclass(frozen=True)
class ScoredChoices:
    """The choices of several questions.

    Attributes:
        likelihoods: The log-likelihood of each choice, (question, choice); minus infinity for choices that a question
            does not have.
        tokens: The number of tokens of each choice, (question, choice).
        right: The place of the right choice, (question,).
    """

    likelihoods: torch.Tensor
    tokens: torch.Tensor
    right: torch.Tensor


@dataclass(frozen=True)
class ModelPredictions(Predictions):
    """Predictions of a model that can also be asked for text.

    Attributes:
        generate: Generates texts for the first examples of the batch. It takes their number and the maximum number of
            tokens, and returns the texts with the target texts. Nothing is generated until it is called.
        score_choices: Scores all choices of the questions of the batch. Only for examples with choices.
    """

    generate: Callable[[int, int], tuple[list[str], list[str]]]
    score_choices: Callable[[], ScoredChoices]


@dataclass(frozen=True)
class GeneratedText(NextToken):
    """Loss and perplexity over all target tokens, and ROUGE F-measures and exact match of greedily generated texts.

    ROUGE compares words of Latin letters and digits in lower case, without stemming. It is omitted if no target has
    such a word. An exact match ignores white space at both ends.

    Attributes:
        max_new_tokens: Maximum number of tokens of a generated text.
        examples: Generate texts for at most so many examples, the first ones; None for all. The loss is over all.

    Raises:
        EvaluationError: When called, if the package rouge-score is not installed.
    """

    max_new_tokens: int = 64
    examples: int | None = None

    metrics: ClassVar[tuple[Metric, ...]] = (ROUGE_L, *map(Metric, ROUGE[:2]), EXACT_MATCH, LOSS, PERPLEXITY)

    def check(self) -> None:
        """Raise an EvaluationError if the package rouge-score is not installed."""
        if find_spec("rouge_score") is None:
            raise EvaluationError(
                "scores of generated texts need the package 'rouge-score': pip install 'partita[text]'"
            )

    def keep(self, batch: Predictions, first: int, details: bool) -> Kept:
        self.check()
        assert isinstance(batch, ModelPredictions), "evaluate() gives predictions that can generate"
        count = len(batch.targets)
        wanted = count if self.examples is None else max(0, min(count, self.examples - first))
        scores = torch.zeros(len(TEXT_SCORES), count, dtype=torch.double)
        if wanted:
            texts, truths = batch.generate(wanted, self.max_new_tokens)
            rows = [scored(*pair) for pair in zip(texts, truths, strict=True)]
            scores[:, :wanted] = torch.tensor(rows, dtype=torch.double).T
        return {
            **super().keep(batch, first, details),
            "scored": torch.arange(count) < wanted,
            **dict(zip(TEXT_SCORES, scores, strict=True)),
        }

    def formula(self, totals: Totals, classes: Sequence[str]) -> dict[str, Floats]:
        found = super().formula(totals, classes)
        words = found.pop(WORDS)
        return found | {name: np.where(words > 0, found[name], np.nan) for name in ROUGE}


def scored(text: str, truth: str) -> tuple[float, ...]:
    """Return `TEXT_SCORES` of a text."""
    from rouge_score import rouge_scorer, tokenizers

    words = tokenizers.DefaultTokenizer(use_stemmer=False)
    rouge = rouge_scorer.RougeScorer(ROUGE, tokenizer=words).score(truth, text)
    return *(rouge[name].fmeasure for name in ROUGE), len(words.tokenize(truth)), text.strip() == truth.strip()
