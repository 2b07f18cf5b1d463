"""Scores of generated texts: ROUGE and exact match, beside the loss per token. rouge-score is imported on first use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import ClassVar

from torch import Tensor

from partita.core.data import IGNORE_INDEX
from partita.evaluation.metrics import LOSS, PERPLEXITY, EvaluationError, Evaluator, Metric, Predictions

ROUGE = ("rouge1", "rouge2", "rougeL")
ROUGE_L = Metric("rougeL")


@dataclass(frozen=True)
class ModelPredictions(Predictions):
    """Predictions of a model that can also be asked for text.

    Attributes:
        generate: Generates texts for the first examples of the batch. It takes their number and the maximum number of
            tokens, and returns the texts with the target texts. Nothing is generated until it is called.
    """

    generate: Callable[[int, int], tuple[list[str], list[str]]]


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
        Metric("exact_match"),
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
        total, count = 0.0, 0
        for batch in batches:
            counts = (batch.targets != IGNORE_INDEX).sum(1)  # (example,)
            total += float((batch.losses * counts).sum())
            count += int(counts.sum())
            wanted = len(counts) if self.examples is None else min(len(counts), self.examples - len(texts))
            if wanted > 0:
                assert isinstance(batch, ModelPredictions), "evaluate() gives predictions that can generate"
                generated, targets = batch.generate(wanted, self.max_new_tokens)
                texts += generated
                truths += targets
        loss = total / count
        return {
            **rouge(texts, truths),
            "exact_match": sum(a.strip() == b.strip() for a, b in zip(texts, truths, strict=True)) / len(texts),
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
        }

    def decisions(self, batch: Predictions) -> tuple[Tensor, Tensor] | None:
        return None


def rouge(texts: Sequence[str], truths: Sequence[str]) -> dict[str, float]:
    """Return the mean ROUGE F-measures; none if no target has a word of Latin letters or digits.

    Args:
        texts: The generated texts.
        truths: The target of each.
    """
    from rouge_score import rouge_scorer, tokenizers

    words = tokenizers.DefaultTokenizer(use_stemmer=False)
    if not any(words.tokenize(truth) for truth in truths):
        return {}
    scorer = rouge_scorer.RougeScorer(ROUGE, tokenizer=words)
    rows = [scorer.score(truth, text) for text, truth in zip(texts, truths, strict=True)]
    return {name: sum(row[name].fmeasure for row in rows) / len(rows) for name in ROUGE}


def with_generation(evaluator: Evaluator, max_new_tokens: int | None, examples: int | None) -> Evaluator:
    """Return the evaluator with these settings of generation. None keeps a setting.

    Raises:
        EvaluationError: If the task generates no text but a setting is given, or if rouge-score is not installed.
    """
    given = {"max_new_tokens": max_new_tokens, "examples": examples}
    changes = {name: value for name, value in given.items() if value is not None}
    if isinstance(evaluator, GeneratedText):
        evaluator.check()
        return replace(evaluator, **changes)
    if changes:
        key = "evaluate.max_new_tokens" if "max_new_tokens" in changes else "evaluate.generate_examples"
        raise EvaluationError(f"{key} is set, but this task generates no text; remove it, or use data.name = 'seq2seq'")
    return evaluator
