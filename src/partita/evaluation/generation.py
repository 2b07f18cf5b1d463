"""Scores of generated texts: ROUGE and exact match, beside the loss per token. rouge-score is imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

import torch

from partita.evaluation.metrics import LOSS, PERPLEXITY, EvaluationError, MeanPerToken, Metric, Predictions

ROUGE = ("rouge1", "rouge2", "rougeL")
WORDS = "words"
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
class GeneratedText:
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

    primary: ClassVar[Metric] = ROUGE_L
    metrics: ClassVar[tuple[Metric, ...]] = (
        *map(Metric, ROUGE[:2]),
        ROUGE_L,
        EXACT_MATCH,
        LOSS,
        PERPLEXITY,
    )
    batch: ClassVar[int] = 16  # logits are as wide as the vocabulary

    def check(self) -> None:
        """Raise an EvaluationError if the package rouge-score is not installed."""
        if find_spec("rouge_score") is None:
            raise EvaluationError(
                "scores of generated texts need the package 'rouge-score': pip install 'partita[text]'"
            )

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]:
        self.check()
        texts: list[str] = []
        truths: list[str] = []
        mean = MeanPerToken()
        for batch in batches:
            mean.add(batch)
            count = len(batch.targets)
            wanted = count if self.examples is None else min(count, self.examples - len(texts))
            if wanted > 0:
                assert isinstance(batch, ModelPredictions), "evaluate() gives predictions that can generate"
                generated, targets = batch.generate(wanted, self.max_new_tokens)
                texts += generated
                truths += targets
        return {**rouge(texts, truths), "exact_match": exact_match(texts, truths), **mean.scores()}

    def decisions(self, batch: Predictions) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None


def exact_match(texts: Sequence[str], truths: Sequence[str]) -> float:
    """Return the share of texts that equal their target, apart from white space at both ends."""
    return sum(map(match, texts, truths)) / len(texts)


def match(text: str, truth: str) -> bool:
    """Return whether a text equals its target, apart from white space at both ends."""
    return text.strip() == truth.strip()


def rouge(texts: Sequence[str], truths: Sequence[str]) -> dict[str, float]:
    """Return the mean ROUGE F-measures; none if no target has a word of Latin letters or digits.

    Args:
        texts: The generated texts.
        truths: The target of each.
    """
    rows = rouge_rows(texts, truths)
    if not any(row[WORDS] for row in rows):
        return {}
    return {name: sum(row[name] for row in rows) / len(rows) for name in ROUGE}


def rouge_rows(texts: Sequence[str], truths: Sequence[str]) -> list[dict[str, float]]:
    """Return the ROUGE F-measures of each text, and the number of "words" of its target that they compare.

    Args:
        texts: The generated texts.
        truths: The target of each.
    """
    from rouge_score import rouge_scorer, tokenizers

    words = tokenizers.DefaultTokenizer(use_stemmer=False)
    scorer = rouge_scorer.RougeScorer(ROUGE, tokenizer=words)
    return [
        {**{name: row[name].fmeasure for name in ROUGE}, WORDS: len(words.tokenize(truth))}
        for truth, row in ((truth, scorer.score(truth, text)) for text, truth in zip(texts, truths, strict=True))
    ]
