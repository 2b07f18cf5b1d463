"""Scores of answers in conversations: loss per token, exact match of generated answers, and multiple choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from partita.core.data import IGNORE_INDEX
from partita.core.tensors import Tensors
from partita.evaluation.generation import EXACT_MATCH, GeneratedText, ModelPredictions, exact_match
from partita.evaluation.metrics import LOSS, PERPLEXITY, EvaluationError, Evaluator, MeanPerToken, Metric, Predictions


@dataclass(frozen=True)
class Answers:
    """Loss and perplexity over all tokens of answers, and exact match of greedily generated answers.

    Generation starts before the last answer of a conversation. An exact match ignores white space at both ends.

    Attributes:
        max_new_tokens: Maximum number of tokens of a generated answer.
        examples: Generate answers for at most so many examples, the first ones. The loss is over all.
    """

    max_new_tokens: int = 64
    examples: int = 0

    primary: ClassVar[Metric] = PERPLEXITY
    metrics: ClassVar[tuple[Metric, ...]] = (LOSS, PERPLEXITY, EXACT_MATCH)
    batch: ClassVar[int] = 16  # logits are as wide as the vocabulary

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]:
        mean = MeanPerToken()
        texts: list[str] = []
        truths: list[str] = []
        for batch in batches:
            mean.add(batch)
            wanted = min(len(batch.targets), self.examples - len(texts))
            if wanted > 0:
                assert isinstance(batch, ModelPredictions), "evaluate() gives predictions that can generate"
                generated, targets = batch.generate(wanted, self.max_new_tokens)
                texts += generated
                truths += targets
        return {**mean.scores(), **({"exact_match": exact_match(texts, truths)} if texts else {})}

    def decisions(self, batch: Predictions) -> tuple[Tensor, Tensor] | None:
        return None


@dataclass(frozen=True)
class Choices:
    """Accuracy of choosing the most likely answer, and loss and perplexity over the tokens of the right answers.

    "accuracy" compares the log-likelihoods of the choices, "normalized_accuracy" these divided by the numbers of their
    tokens. Of equally likely choices, the first one is chosen.
    """

    primary: ClassVar[Metric] = Metric("accuracy")
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("accuracy"), Metric("normalized_accuracy"), LOSS, PERPLEXITY)
    batch: ClassVar[int] = 16  # logits are as wide as the vocabulary

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]:
        mean = MeanPerToken()
        right, normalized, count = 0, 0, 0
        for batch in batches:
            assert isinstance(batch, ModelPredictions), "evaluate() gives predictions that can score choices"
            mean.add(batch)
            chosen = batch.score_choices()
            right += int((chosen.likelihoods.argmax(1) == chosen.right).sum())
            normalized += int(((chosen.likelihoods / chosen.tokens).argmax(1) == chosen.right).sum())
            count += len(chosen.right)
        return {"accuracy": right / count, "normalized_accuracy": normalized / count, **mean.scores()}

    def decisions(self, batch: Predictions) -> tuple[Tensor, Tensor] | None:
        return None


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
    if isinstance(evaluator, Answers):
        return replace(evaluator, **changes)
    if changes:
        key = "evaluate.max_new_tokens" if "max_new_tokens" in changes else "evaluate.generate_examples"
        raise EvaluationError(
            f"{key} is set, but this task generates no text; remove it, or use data.name = 'chat' or 'seq2seq'"
        )
    return evaluator


def last_answers(inputs: Tensors, targets: Tensor) -> tuple[Tensors, Tensor]:
    """Return the prompts of the last answers, and these answers.

    Args:
        inputs: Token rows, padded at the end.
        targets: The next tokens, (example, token). Those that belong to no answer are ignored.

    Returns:
        The inputs with all tokens before the last answer, padded at the start, as generation needs them; and the
        targets (example, token) of the last answers only.
    """
    answered = targets != IGNORE_INDEX
    steps = torch.arange(targets.shape[1], device=targets.device)
    starts = answered & ~functional.pad(answered, (1, 0))[:, :-1]  # a token before each answer
    first = (starts * steps).amax(1)  # (example,): the last token of the prompt
    width = int(first.max()) + 1
    places = steps[:width] - (width - 1 - first).unsqueeze(1)  # (example, token), negative for padding
    ids = inputs["input_ids"].gather(1, places.clamp(min=0))
    mask = (places >= 0).long()
    return {"input_ids": ids * mask, "attention_mask": mask}, targets.masked_fill(
        steps < first.unsqueeze(1), IGNORE_INDEX
    )
