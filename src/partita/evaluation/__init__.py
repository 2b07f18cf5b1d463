"""Evaluate a model on a set of examples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from partita.core import tensors
from partita.core.data import IGNORE_INDEX, Examples, PrefetchingExamples
from partita.core.model import Model
from partita.core.tensors import Tensors
from partita.evaluation import metrics
from partita.evaluation.answers import Answers, Choices, last_answers
from partita.evaluation.documents import document_predictions
from partita.evaluation.generation import GeneratedText, ModelPredictions, ScoredChoices
from partita.evaluation.metrics import Accuracy, EvaluationError, Evaluator, Metric, Predictions
from partita.evaluation.segmentation import Segmentation

__all__ = [
    "ACCURACY",
    "METRIC_NAMES",
    "Evaluation",
    "EvaluationError",
    "Evaluator",
    "Metric",
    "evaluate",
    "sample_texts",
    "score",
]

ACCURACY = Accuracy()
METRIC_NAMES = tuple(
    dict.fromkeys(
        (
            *metrics.METRIC_NAMES,
            *(
                metric.name
                for evaluator in (GeneratedText, Answers, Choices, Segmentation)
                for metric in evaluator.metrics
            ),
        )
    )
)


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model, and whether it predicts the same for all examples.

    Attributes:
        scores: The scores by name.
        constant: The classes that the model predicts everywhere, by number; empty if it predicts none of several
            labels. None if its predictions differ, as they should if the targets do, or if nothing is classified.
    """

    scores: dict[str, float]
    constant: tuple[int, ...] | None = None


def score(model: Model, params: Tensors, examples: Examples, evaluator: Evaluator = ACCURACY) -> dict[str, float]:
    """Return the scores of a model by name. An empty set of examples has none.

    Args:
        model: The model.
        params: All its parameters, on the device to evaluate on.
        examples: The examples to evaluate on.
        evaluator: Computes the scores; `task.kind.evaluator(task.classes)` is the one of a task.
    """
    return evaluate(model, params, examples, evaluator).scores


def evaluate(model: Model, params: Tensors, examples: Examples, evaluator: Evaluator = ACCURACY) -> Evaluation:
    """Return the scores of a model, and whether it predicts the same for all examples, from one forward pass.

    Args:
        model: The model.
        params: All its parameters, on the device to evaluate on.
        examples: The examples to evaluate on.
        evaluator: Computes the scores.
    """
    if not len(examples):
        return Evaluation({})
    seen = _Decisions(evaluator)
    scores = evaluator(map(seen.add, _predictions(model, params, examples, evaluator.batch)))
    return Evaluation(scores, seen.constant())


class _Decisions:
    """Watches the batches of one evaluation for predictions that never differ, although the targets do."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self.predicted: Tensor | None = None  # the first decision
        self.target: Tensor | None = None  # the first target
        self.differ = self.targets_differ = False

    def add(self, batch: Predictions) -> Predictions:
        """Look at a batch and return it. Almost always the first batch settles the question."""
        decisions = None if self.differ else self.evaluator.decisions(batch)
        if decisions is not None and len(decisions[0]):
            predicted, targets = decisions
            if self.predicted is None or self.target is None:
                self.predicted, self.target = predicted[0], targets[0]
            self.differ = bool((predicted != self.predicted).any())
            self.targets_differ = self.targets_differ or bool((targets != self.target).any())
        return batch

    def constant(self) -> tuple[int, ...] | None:
        """Return the classes of the only decision; None if there are several, or if one is enough for the targets."""
        if self.predicted is None or self.differ or not self.targets_differ:
            return None
        first = self.predicted.flatten().tolist()
        return tuple(first) if not self.predicted.ndim else tuple(place for place, on in enumerate(first) if on)


@torch.inference_mode()
def _predictions(model: Model, params: Tensors, examples: Examples, size: int) -> Iterator[Predictions]:
    documents = getattr(examples, "documents", None)
    if documents is not None:
        yield from document_predictions(model, params, examples, documents, size)
        return
    device = next(iter(params.values())).device
    for indices, following in pairwise([*torch.arange(len(examples)).split(size), None]):
        batch = examples.take(indices)
        if following is not None and isinstance(examples, PrefetchingExamples):
            examples.prefetch(following)
        inputs, targets = tensors.to(batch.inputs, device), batch.targets.to(device)
        out = model(params, inputs).with_logits()
        yield ModelPredictions(
            out.logits,
            targets,
            model.losses(out, targets),
            partial(_generate, model, params, inputs, targets),
            partial(_score_choices, model, params, examples, indices, size),
        )


def _generate(
    model: Model, params: Tensors, inputs: Tensors, targets: Tensor, examples: int, max_new_tokens: int
) -> tuple[list[str], list[str]]:
    """Generate texts for the first examples of a batch, and return them with the target texts."""
    read, wanted = _prompts({name: value[:examples] for name, value in inputs.items()}, targets[:examples])
    return model.generate(params, read, max_new_tokens), model.decode(wanted)


def _prompts(inputs: Tensors, targets: Tensor) -> tuple[Tensors, Tensor]:
    """Return what a model reads to generate a text, and the target texts. A decoder's own inputs hold its answer."""
    return (inputs, targets) if "decoder_input_ids" in inputs else last_answers(inputs, targets)


def sample_texts(
    model: Model, params: Tensors, examples: Examples, count: int, max_new_tokens: int
) -> list[tuple[str, str, str]]:
    """Generate texts for the first examples.

    Args:
        model: The model.
        params: All its parameters, on the device to generate on.
        examples: Examples of a task that generates texts.
        count: The number of examples, if there are so many.
        max_new_tokens: Maximum number of tokens of a text.

    Returns:
        For each example, what the model reads, the target text, and the generated text.
    """
    count = min(count, len(examples))
    if not count:
        return []
    device = next(iter(params.values())).device
    batch = examples.take(torch.arange(count))
    read, wanted = _prompts(tensors.to(batch.inputs, device), batch.targets.to(device))
    ids = read["input_ids"].masked_fill(read["attention_mask"] == 0, IGNORE_INDEX)
    texts = model.generate(params, read, max_new_tokens)
    return list(zip(model.decode(ids), model.decode(wanted), texts, strict=True))


@torch.inference_mode()
def _score_choices(model: Model, params: Tensors, examples: Any, indices: Tensor, size: int) -> ScoredChoices:
    """Score all choices of some questions, at most `size` choices at a time."""
    batch, counts, right = examples.take_choices(indices)
    device = next(iter(params.values())).device
    tokens = (batch.targets != IGNORE_INDEX).sum(1)  # (choice,)
    likelihoods = []
    for rows in torch.arange(len(tokens)).split(size):
        inputs = tensors.to({name: value[rows] for name, value in batch.inputs.items()}, device)
        losses = model.losses(model(params, inputs), batch.targets[rows].to(device))
        likelihoods.append(-losses.double().cpu() * tokens[rows])
    of_question = torch.cat(likelihoods).split(counts.tolist())
    return ScoredChoices(
        pad_sequence(of_question, True, -torch.inf),
        pad_sequence(tokens.split(counts.tolist()), True, 1),
        right,
    )
