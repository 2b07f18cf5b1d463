"""Evaluate a model on a set of examples."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from itertools import chain
from typing import Any, ParamSpec, TypeVar

import torch

from partita.core import tensors
from partita.core.data import IGNORE_INDEX, Examples, PrefetchingExamples
from partita.core.model import Forward, Model, logits_and_losses
from partita.core.tensors import Tensors
from partita.evaluation.answers import Answers, Choices, last_answers
from partita.evaluation.confusion import confusion_matrix
from partita.evaluation.documents import document_predictions
from partita.evaluation.evaluator import EvaluationError, Evaluator, Predictions
from partita.evaluation.generation import GeneratedText, ModelPredictions, ScoredChoices
from partita.evaluation.metrics import (
    NEW_CLASS_METRICS,
    Accuracy,
    Entities,
    MultiLabel,
    NextToken,
    Regression,
    SingleLabel,
)
from partita.evaluation.outcomes import Outcomes, outcomes
from partita.evaluation.segmentation import Segmentation

__all__ = [
    "ACCURACY",
    "EVALUATORS",
    "METRICS",
    "Evaluation",
    "EvaluationError",
    "Evaluator",
    "evaluate",
    "outcomes_of",
    "sample_texts",
    "score",
]

P = ParamSpec("P")
T = TypeVar("T")
ACCURACY = Accuracy()
EVALUATORS = (
    Accuracy,
    SingleLabel,
    MultiLabel,
    Entities,
    NextToken,
    Regression,
    GeneratedText,
    Answers,
    Choices,
    Segmentation,
)
METRICS = tuple(dict.fromkeys(chain(*(each.metrics for each in EVALUATORS), NEW_CLASS_METRICS)))


def _in_inference_mode(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate with `torch.inference_mode()` when called: importing this module must not import torch."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        result: T = torch.inference_mode()(function)(*args, **options)
        return result

    return call


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model, and whether it predicts the same for all examples.

    Attributes:
        scores: The scores by name.
        constant: The classes that the model predicts everywhere, by number; empty if it predicts none of several
            labels. None if its predictions differ, as they should if the targets do, or if nothing is classified.
        confusion: Numbers of examples by true and predicted class; None if they were not asked for.
    """

    scores: dict[str, float]
    constant: tuple[int, ...] | None = None
    confusion: list[list[int]] | None = None


def score(
    model: Model,
    params: Tensors,
    examples: Examples,
    evaluator: Evaluator = ACCURACY,
    forward: Forward = logits_and_losses,
) -> dict[str, float]:
    """Return the scores of a model by name. An empty set of examples has none.

    Args:
        model: The model.
        params: All its parameters, on the device to evaluate on.
        examples: The examples to evaluate on.
        evaluator: Computes the scores; `task.kind.evaluator(task.classes)` is the one of a task.
        forward: Runs the model on a batch.
    """
    return evaluate(model, params, examples, evaluator, forward=forward).scores


def evaluate(
    model: Model,
    params: Tensors,
    examples: Examples,
    evaluator: Evaluator = ACCURACY,
    confused: int = 0,
    forward: Forward = logits_and_losses,
) -> Evaluation:
    """Return the scores of a model, and whether it predicts the same for all examples, from one forward pass.

    Args:
        model: The model.
        params: All its parameters, on the device to evaluate on.
        examples: The examples to evaluate on.
        evaluator: Computes the scores.
        confused: The number of classes, to count how often each is taken for which; 0 not to. Each example must have
            one class.
        forward: Runs the model on a batch.
    """
    if not len(examples):
        return Evaluation({})
    seen, pairs = _Decisions(evaluator), _Pairs(evaluator, confused)
    batches = map(seen.add, _predictions(model, params, examples, evaluator.batch, forward))
    scores = evaluator(map(pairs.add, batches))
    return Evaluation(scores, seen.constant(), pairs.counts())


class _Pairs:
    """Counts true and predicted classes of the batches of one evaluation."""

    def __init__(self, evaluator: Evaluator, classes: int) -> None:
        self.evaluator, self.classes = evaluator, classes
        self.total: torch.Tensor | None = None  # (true class, predicted class); stays on the device until the end

    def add(self, batch: Predictions) -> Predictions:
        """Count a batch and return it."""
        # A model of the user's own may have more outputs than the task has classes, or examples without a class.
        decisions = self.evaluator.decisions(batch) if batch.logits.shape[-1] == self.classes else None
        if decisions is not None:
            predicted, labels = decisions
            found = confusion_matrix(predicted[labels >= 0], labels[labels >= 0], self.classes)
            self.total = found if self.total is None else self.total + found
        return batch

    def counts(self) -> list[list[int]] | None:
        """Return the counts of all batches; None if nothing was counted."""
        return None if self.total is None else self.total.tolist()


def outcomes_of(
    model: Model, params: Tensors, examples: Examples, evaluator: Evaluator, classes: tuple[str, ...]
) -> Outcomes:
    """Return what a model does on each example, from one forward pass; on documents, if examples are parts of them.

    Args:
        model: The model.
        params: All its parameters, on the device to evaluate on.
        examples: The examples, at least one.
        evaluator: Says which scores there are.
        classes: The names of the task's outputs.
    """
    return outcomes(evaluator, _predictions(model, params, examples, evaluator.batch), classes)


class _Decisions:
    """Watches the batches of one evaluation for predictions that never differ, although the targets do."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self.predicted: torch.Tensor | None = None  # the first decision
        self.target: torch.Tensor | None = None  # the first target
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


@_in_inference_mode
def _predictions(
    model: Model, params: Tensors, examples: Examples, size: int, forward: Forward = logits_and_losses
) -> Iterator[Predictions]:
    documents = getattr(examples, "documents", None)
    if documents is not None:
        yield from document_predictions(model, params, examples, documents, size, forward)
        return
    device = next(iter(params.values())).device
    left = deque(torch.arange(len(examples)).split(size))
    while left:
        indices = left.popleft()
        batch = examples.take(indices)
        if left and isinstance(examples, PrefetchingExamples):
            examples.prefetch(left[0])
        inputs, targets = tensors.to(batch.inputs, device), batch.targets.to(device)
        try:
            logits, losses = forward(model, params, inputs, targets)
        except torch.OutOfMemoryError:
            if len(indices) == 1:
                raise
            size = len(indices) // 2
            warnings.warn(
                f"out of memory while evaluating {len(indices)} examples together; from now on it is {size}",
                stacklevel=2,
            )
            left = deque(torch.cat([indices, *left]).split(size))
            continue
        yield ModelPredictions(
            logits,
            targets,
            losses,
            partial(_generate, model, params, inputs, targets),
            partial(_score_choices, model, params, examples, indices, size),
        )


def _generate(
    model: Model, params: Tensors, inputs: Tensors, targets: torch.Tensor, examples: int, max_new_tokens: int
) -> tuple[list[str], list[str]]:
    """Generate texts for the first examples of a batch, and return them with the target texts."""
    read, wanted = _prompts({name: value[:examples] for name, value in inputs.items()}, targets[:examples])
    return model.generate(params, read, max_new_tokens), model.decode(wanted)


def _prompts(inputs: Tensors, targets: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
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


@_in_inference_mode
def _score_choices(model: Model, params: Tensors, examples: Any, indices: torch.Tensor, size: int) -> ScoredChoices:
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
        torch.nn.utils.rnn.pad_sequence(of_question, True, -torch.inf),
        torch.nn.utils.rnn.pad_sequence(tokens.split(counts.tolist()), True, 1),
        right,
    )
