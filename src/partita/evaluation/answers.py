"""Scores of answers in conversations: loss per token, exact match, and multiple choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from partita.core.data import IGNORE_INDEX
from partita.core.tensors import Tensors
from partita.evaluation.by_example import Kept
from partita.evaluation.evaluator import EvaluationError, Evaluator, Predictions
from partita.evaluation.generation import EXACT_MATCH, GeneratedText, ModelPredictions
from partita.evaluation.metrics import LOSS, PERPLEXITY, NextToken
from partita.record.metric import ACCURACY, Metric


@dataclass(frozen=True)
class Answers(NextToken):
    """Loss and perplexity over all tokens of answers, and exact match.

    The last answer of a conversation matches exactly if each of its tokens, with the one that ends it, is the most
    probable after the tokens before it: greedy generation would then give this answer and no other. So nothing has to
    be generated.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (PERPLEXITY, LOSS, EXACT_MATCH)

    def keep(self, batch: Predictions, first: int, details: bool) -> Kept:
        return {**super().keep(batch, first, details), "exact_match": exact_answers(batch)}


@dataclass(frozen=True)
class Choices(NextToken):
    """Accuracy of choosing the most likely answer, and loss and perplexity over the tokens of the right answers.

    "accuracy" compares the log-likelihoods of the choices, "normalized_accuracy" these divided by the numbers of their
    tokens. Of equally likely choices, the first one is chosen.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (ACCURACY, Metric("normalized_accuracy"), LOSS, PERPLEXITY)

    def keep(self, batch: Predictions, first: int, details: bool) -> Kept:
        assert isinstance(batch, ModelPredictions), "evaluate() gives predictions that can score choices"
        chosen = batch.score_choices()
        return {
            **super().keep(batch, first, details),
            "accuracy": chosen.likelihoods.argmax(1) == chosen.right,
            "normalized_accuracy": (chosen.likelihoods / chosen.tokens).argmax(1) == chosen.right,
        }


def exact_answers(batch: Predictions) -> torch.Tensor:
    """Return whether the last answer of each conversation matches exactly, (example,)."""
    answers = _last_only(batch.targets, _last_starts(batch.targets))
    right = (batch.logits.argmax(-1) == answers) | (answers == IGNORE_INDEX)  # (example, token)
    return right.all(1)


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
        changes.pop("max_new_tokens", None)  # it is for the samples of `evaluate.samples`
    if changes:
        key = "evaluate.max_new_tokens" if "max_new_tokens" in changes else "evaluate.generate_examples"
        raise EvaluationError(
            f"{key} is set, but this task needs no generated text for its scores; remove it, or use data.name = "
            "'seq2seq'"
        )
    return evaluator


def last_answers(inputs: Tensors, targets: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Return the prompts of the last answers, and these answers.

    Args:
        inputs: Token rows, padded at the end.
        targets: The next tokens, (example, token). Those that belong to no answer are ignored.

    Returns:
        The inputs with all tokens before the last answer, padded at the start, as generation needs them; and the
        targets (example, token) of the last answers only.
    """
    first = _last_starts(targets)
    width = int(first.max()) + 1
    steps = torch.arange(width, device=targets.device)
    places = steps - (width - 1 - first).unsqueeze(1)  # (example, token), negative for padding
    ids = inputs["input_ids"].gather(1, places.clamp(min=0))
    mask = (places >= 0).long()
    return {"input_ids": ids * mask, "attention_mask": mask}, _last_only(targets, first)


def _last_starts(targets: torch.Tensor) -> torch.Tensor:
    """Return where the last answers start, (example,): the place of the last token of their prompts."""
    answered = targets != IGNORE_INDEX
    starts = answered & ~torch.nn.functional.pad(answered, (1, 0))[:, :-1]
    return (starts * torch.arange(targets.shape[1], device=targets.device)).amax(1)


def _last_only(targets: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    places = torch.arange(targets.shape[1], device=targets.device)
    return targets.masked_fill(places < starts.unsqueeze(1), IGNORE_INDEX)
