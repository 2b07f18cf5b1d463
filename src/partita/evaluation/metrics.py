"""Evaluators for each kind of task. scikit-learn and seqeval are imported on first use."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from partita.core.data import IGNORE_INDEX


class EvaluationError(ValueError):
    """A score cannot be computed."""


@dataclass(frozen=True)
class Metric:
    """A score.

    Attributes:
        name: Name in rows and reports.
        higher_is_better: Direction.
        fraction: Whether all values are in [0, 1]. Reports show fractions in percent.
    """

    name: str
    higher_is_better: bool = True
    fraction: bool = True


LOSS = Metric("loss", higher_is_better=False, fraction=False)
PERPLEXITY = Metric("perplexity", higher_is_better=False, fraction=False)
MSE = Metric("mse", higher_is_better=False, fraction=False)
MAE = Metric("mae", higher_is_better=False, fraction=False)
R2 = Metric("r2", fraction=False)  # at most 1, and negative if the mean of the targets would be a better prediction


@dataclass(frozen=True)
class Predictions:
    """Logits, targets and losses of a batch.

    Attributes:
        logits: The model's logits, (example, ...).
        targets: The targets, (example, ...).
        losses: The loss of each example, (example,).
    """

    logits: Tensor
    targets: Tensor
    losses: Tensor


class Evaluator(Protocol):
    """Computes scores from batches of predictions. Scores that are undefined for the examples are omitted."""

    @property
    def primary(self) -> Metric:
        """The metric that a run is judged by."""
        ...

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """All metrics that it can return."""
        ...

    @property
    def batch(self) -> int:
        """The batch size for evaluation."""
        ...

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]: ...

    def decisions(self, batch: Predictions) -> tuple[Tensor, Tensor] | None:
        """Return what is predicted and what is true, each (decision, ...); None if nothing is classified.

        A decision is the class of an example or of a token, or the set of labels of an example.
        """
        ...


@dataclass(frozen=True)
class Accuracy:
    """Accuracy and mean loss only: cheap for large test sets."""

    primary: ClassVar[Metric] = Metric("accuracy")
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("accuracy"), LOSS)
    batch: ClassVar[int] = 512  # large, because no activations are kept for a backward pass

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]:
        right = loss = 0.0
        count = 0
        for batch in batches:
            right += float((batch.logits.argmax(-1) == batch.targets).sum())
            loss += float(batch.losses.sum())
            count += len(batch.targets)
        return {"accuracy": right / count, "loss": loss / count}

    def decisions(self, batch: Predictions) -> tuple[Tensor, Tensor] | None:
        return batch.logits.argmax(-1), batch.targets


@dataclass(frozen=True)
class SingleLabel:
    """Single-label classification. Macro averages are over the classes that occur. AUROC is one-vs-rest."""

    primary: ClassVar[Metric] = Metric("accuracy")
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("accuracy"),
        Metric("macro_f1"),
        Metric("micro_f1"),
        Metric("auroc"),
        LOSS,
    )
    batch: ClassVar[int] = 64

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]:
        logits, targets, loss = _gathered(batches)
        guesses = logits.argmax(1)
        truth = functional.one_hot(targets, logits.shape[1])  # (example, class)
        return {
            "accuracy": float((guesses == targets).double().mean()),
            **_f1(targets.numpy(), guesses.numpy()),
            **_auroc(truth.numpy(), logits.double().softmax(1).numpy()),
            "loss": loss,
        }

    def decisions(self, batch: Predictions) -> tuple[Tensor, Tensor] | None:
        return batch.logits.argmax(-1), batch.targets


@dataclass(frozen=True)
class MultiLabel:
    """Multi-label classification with threshold 0.5. Macro averages are over the classes that occur."""

    primary: ClassVar[Metric] = Metric("micro_f1")
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("macro_f1"), Metric("micro_f1"), Metric("auroc"), LOSS)
    batch: ClassVar[int] = 64

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]:
        logits, targets, loss = _gathered(batches)
        truth = targets.long().numpy()  # (example, class)
        return {**_f1(truth, (logits > 0).long().numpy()), **_auroc(truth, logits.double().numpy()), "loss": loss}

    def decisions(self, batch: Predictions) -> tuple[Tensor, Tensor] | None:
        return (batch.logits > 0).long(), batch.targets.long()  # (example, class)


@dataclass(frozen=True)
class Entities:
    """Entity scores from BIO tags, as in seqeval's strict mode: the type and all words of an entity must match.

    Attributes:
        tags: The name of each class, such as "B-person", in the order of the logits.

    Raises:
        EvaluationError: If the package seqeval is not installed.
    """

    tags: tuple[str, ...]

    primary: ClassVar[Metric] = Metric("f1")
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("precision"),
        Metric("recall"),
        Metric("f1"),
        Metric("accuracy"),
        LOSS,
    )
    batch: ClassVar[int] = 64

    def __post_init__(self) -> None:
        if find_spec("seqeval") is None:
            raise EvaluationError("entity scores need the package 'seqeval': pip install 'partita[text]'")

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]:
        truths: list[list[str]] = []
        guesses: list[list[str]] = []
        mean = _MeanPerToken()
        right = 0
        for batch in batches:
            mean.add(batch)
            predicted, targets = batch.logits.argmax(-1).cpu(), batch.targets.cpu()  # (example, token)
            valid = targets != IGNORE_INDEX
            right += int(((predicted == targets) & valid).sum())
            for row, real in enumerate(valid):
                truths.append([self.tags[tag] for tag in targets[row][real].tolist()])
                guesses.append([self.tags[tag] for tag in predicted[row][real].tolist()])
        scores = {"accuracy": right / mean.count, "loss": mean.value} if mean.count else {}
        return {**_entity_scores(truths, guesses), **scores}

    def decisions(self, batch: Predictions) -> tuple[Tensor, Tensor] | None:
        valid = batch.targets != IGNORE_INDEX
        return batch.logits.argmax(-1)[valid], batch.targets[valid]  # (token,)


@dataclass(frozen=True)
class NextToken:
    """Mean loss per token, and its exponential, the perplexity."""

    primary: ClassVar[Metric] = PERPLEXITY
    metrics: ClassVar[tuple[Metric, ...]] = (LOSS, PERPLEXITY)
    batch: ClassVar[int] = 16  # logits are as wide as the vocabulary

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]:
        mean = _MeanPerToken()
        for batch in batches:
            mean.add(batch)
        return {"loss": mean.value, "perplexity": math.exp(mean.value) if mean.value < 700 else math.inf}

    def decisions(self, batch: Predictions) -> tuple[Tensor, Tensor] | None:
        return None


@dataclass(frozen=True)
class Regression:
    """Errors in the units of the targets, as means over targets. R² is a mean over the targets that vary."""

    # Not R²: it is undefined for a single example, and a client whose targets hardly vary would dominate every mean.
    primary: ClassVar[Metric] = MSE
    metrics: ClassVar[tuple[Metric, ...]] = (MSE, MAE, R2, LOSS)
    batch: ClassVar[int] = 64

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]:
        predictions, targets, loss = _gathered(batches)
        errors, targets = predictions.double() - targets.double(), targets.double()  # (example, target)
        return {
            "mse": float(errors.square().mean()),
            "mae": float(errors.abs().mean()),
            **_r2(errors, targets),
            "loss": loss,
        }

    def decisions(self, batch: Predictions) -> tuple[Tensor, Tensor] | None:
        return None


METRIC_NAMES = tuple(
    dict.fromkeys(
        metric.name
        for evaluator in (Accuracy, SingleLabel, MultiLabel, Entities, NextToken, Regression)
        for metric in evaluator.metrics
    )
)


class _MeanPerToken:
    """Turns per-example mean losses into the mean over all tokens."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, predictions: Predictions) -> None:
        counts = (predictions.targets != IGNORE_INDEX).sum(1)  # (example,)
        self.total += float((predictions.losses * counts).sum())
        self.count += int(counts.sum())

    @property
    def value(self) -> float:
        return self.total / self.count


def _gathered(batches: Iterator[Predictions]) -> tuple[Tensor, Tensor, float]:
    """Return the logits, targets and mean loss of all examples."""
    outputs = [(batch.logits.cpu(), batch.targets.cpu(), batch.losses.cpu()) for batch in batches]
    logits, targets, losses = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    return logits, targets, float(losses.double().mean())


def _f1(truth: NDArray[Any], guesses: NDArray[Any]) -> dict[str, float]:
    from sklearn.metrics import f1_score

    scores = {
        f"{average}_f1": float(f1_score(truth, guesses, average=average, zero_division=np.nan))
        for average in ("macro", "micro")
    }
    return {name: value for name, value in scores.items() if not math.isnan(value)}


def _auroc(truth: NDArray[Any], scores: NDArray[Any]) -> dict[str, float]:
    """Return the mean AUROC over the classes with both positive and negative examples."""
    from sklearn.metrics import roc_auc_score

    both = np.flatnonzero(truth.any(0) & ~truth.all(0))
    if not len(both) or not np.isfinite(scores).all():
        return {}
    return {"auroc": float(np.mean([roc_auc_score(truth[:, place], scores[:, place]) for place in both]))}


def _r2(errors: Tensor, targets: Tensor) -> dict[str, float]:
    """Return the mean R² over the targets that vary. For a constant target it is undefined."""
    varies = targets.amin(0) < targets.amax(0)  # (target,)
    deviations = (targets - targets.mean(0)).square().sum(0)[varies]
    value = float((1 - errors.square().sum(0)[varies] / deviations).mean())  # NaN if no target varies
    return {"r2": value} if math.isfinite(value) else {}


def _entity_scores(truths: list[list[str]], guesses: list[list[str]]) -> dict[str, float]:
    from seqeval.metrics.v1 import precision_recall_fscore_support
    from seqeval.scheme import IOB2

    if not any(tag != "O" for row in (*truths, *guesses) for tag in row):
        return {}
    values = precision_recall_fscore_support(truths, guesses, average="micro", zero_division=0, scheme=IOB2)
    return {name: float(value) for name, value in zip(("precision", "recall", "f1"), values[:3], strict=True)}
