"""Evaluators for each kind of task. scikit-learn is imported on first use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from partita.core.data import IGNORE_INDEX
from partita.evaluation import ranking
from partita.evaluation.calibration import Calibration
from partita.evaluation.entities import Counts, TagScheme

Area = Callable[[NDArray[Any], NDArray[Any], ranking.Floats], ranking.Floats]  # of `ranking`


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

    def worst_tenth(self, values: Sequence[float]) -> list[float]:
        """Return the worst tenth of the clients' values, at least one, the worst first."""
        return sorted(values, reverse=not self.higher_is_better)[: math.ceil(len(values) / 10)]


LOSS = Metric("loss", higher_is_better=False, fraction=False)
PERPLEXITY = Metric("perplexity", higher_is_better=False, fraction=False)
MSE = Metric("mse", higher_is_better=False, fraction=False)
MAE = Metric("mae", higher_is_better=False, fraction=False)
ECE = Metric("ece", higher_is_better=False)
R2 = Metric("r2", fraction=False)  # at most 1, and negative if the mean of the targets would be a better prediction


@dataclass(frozen=True)
class Predictions:
    """Logits, targets and losses of a batch.

    Attributes:
        logits: The model's logits, (example, ...).
        targets: The targets, (example, ...).
        losses: The loss of each example, (example,).
    """

    logits: torch.Tensor
    targets: torch.Tensor
    losses: torch.Tensor


class Evaluator(Protocol):
    """Computes scores from batches of predictions. Scores that are undefined for the examples are omitted.

    Besides its `metrics`, an evaluator may return scores of single entity types, named as by `type_score`. They say
    more about the examples than other scores, so they are computed everywhere but leave no client.
    """

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

    def decisions(self, batch: Predictions) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what is predicted and what is true, each (decision, ...); None if nothing is classified.

        A decision is the class of an example or of a token, or the set of labels of an example.
        """
        ...


@dataclass(frozen=True)
class Accuracy:
    """Accuracy, calibration error and mean loss only: cheap for large test sets."""

    primary: ClassVar[Metric] = Metric("accuracy")
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("accuracy"), ECE, LOSS)
    batch: ClassVar[int] = 512  # large, because no activations are kept for a backward pass

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]:
        calibration = Calibration()
        loss: list[torch.Tensor] = []
        count = 0
        for batch in batches:
            calibration.add(batch.logits, batch.targets)
            loss.append(batch.losses.sum())
            count += len(batch.targets)
        return {**calibration.scores(), "loss": sum(torch.stack(loss).tolist()) / count}

    def decisions(self, batch: Predictions) -> tuple[torch.Tensor, torch.Tensor] | None:
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
        ECE,
        LOSS,
    )
    batch: ClassVar[int] = 64

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]:
        logits, targets, loss = _gathered(batches)
        guesses = logits.argmax(1)
        calibration = Calibration()
        calibration.add(logits, targets)
        truth = torch.nn.functional.one_hot(targets, logits.shape[1])  # (example, class)
        return {
            **calibration.scores(),
            **_f1(targets.numpy(), guesses.numpy()),
            **_auroc(truth.numpy(), logits.double().softmax(1).numpy()),
            "loss": loss,
        }

    def decisions(self, batch: Predictions) -> tuple[torch.Tensor, torch.Tensor] | None:
        return batch.logits.argmax(-1), batch.targets


@dataclass(frozen=True)
class MultiLabel:
    """Multi-label classification. Macro averages are over the classes that occur.

    F1 is for the threshold 0.5. AUROC and AUPRC need none; AUPRC is the average precision, and its micro average ranks
    all pairs of an example and a class in one list.
    """

    primary: ClassVar[Metric] = Metric("micro_f1")
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("macro_f1"),
        Metric("micro_f1"),
        Metric("auroc"),
        Metric("macro_auprc"),
        Metric("micro_auprc"),
        LOSS,
    )
    batch: ClassVar[int] = 64

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]:
        logits, targets, loss = _gathered(batches)
        truth = targets.long().numpy()  # (example, class)
        scores = logits.double().numpy()
        return {
            **_f1(truth, (logits > 0).long().numpy()),
            **_auroc(truth, scores),
            **_auprc(truth, scores),
            "loss": loss,
        }

    def decisions(self, batch: Predictions) -> tuple[torch.Tensor, torch.Tensor] | None:
        return (batch.logits > 0).long(), batch.targets.long()  # (example, class)


@dataclass(frozen=True)
class Entities:
    """Entity scores from BIO tags, of all types together and of each type.

    Strict matching is as in seqeval's strict mode: the type and all words of an entity must match. Relaxed matching is
    as in the i2b2 and n2c2 challenges: the type must match, and one word is enough. A true entity counts for one
    predicted entity, so two halves of it are one match and one error.

    Attributes:
        tags: The name of each class, such as "B-person", in the order of the logits.
    """

    tags: tuple[str, ...]

    primary: ClassVar[Metric] = Metric("f1")
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("precision"),
        Metric("recall"),
        Metric("f1"),
        Metric("relaxed_precision"),
        Metric("relaxed_recall"),
        Metric("relaxed_f1"),
        Metric("accuracy"),
        LOSS,
    )
    batch: ClassVar[int] = 64

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]:
        scheme, mean = TagScheme(self.tags), MeanPerToken()
        counts = [Counts() for _ in scheme.types]
        right = 0
        for batch in batches:
            mean.add(batch)
            predicted, targets = batch.logits.argmax(-1).cpu(), batch.targets.cpu()  # (example, token)
            valid = targets != IGNORE_INDEX
            right += int(((predicted == targets) & valid).sum())
            first = (valid & (valid.cumsum(1) == 1))[valid].numpy()  # (token,)
            true, told = (scheme.spans(tags[valid].numpy(), first) for tags in (targets, predicted))
            counts = [old + new for old, new in zip(counts, scheme.count(true, told), strict=True)]
        scores = {"accuracy": right / mean.count, "loss": mean.value} if mean.count else {}
        return {**sum(counts, Counts()).scores(), **scores, **_by_type(scheme.types, counts)}

    def decisions(self, batch: Predictions) -> tuple[torch.Tensor, torch.Tensor] | None:
        valid = batch.targets != IGNORE_INDEX
        return batch.logits.argmax(-1)[valid], batch.targets[valid]  # (token,)


@dataclass(frozen=True)
class NextToken:
    """Mean loss per token, and its exponential, the perplexity."""

    primary: ClassVar[Metric] = PERPLEXITY
    metrics: ClassVar[tuple[Metric, ...]] = (LOSS, PERPLEXITY)
    batch: ClassVar[int] = 16  # logits are as wide as the vocabulary

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]:
        mean = MeanPerToken()
        for batch in batches:
            mean.add(batch)
        return mean.scores()

    def decisions(self, batch: Predictions) -> tuple[torch.Tensor, torch.Tensor] | None:
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

    def decisions(self, batch: Predictions) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None


# Scores of a test on classes that no client trained on; its harmonic mean is with the score on the others.
NEW_CLASS_METRICS = (Metric("new_accuracy"), Metric("harmonic_mean"))
METRIC_NAMES = tuple(
    dict.fromkeys(
        metric.name
        for metrics in (
            *(each.metrics for each in (Accuracy, SingleLabel, MultiLabel, Entities, NextToken, Regression)),
            NEW_CLASS_METRICS,
        )
        for metric in metrics
    )
)


class MeanPerToken:
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

    def scores(self) -> dict[str, float]:
        """Return "loss" and its exponential, "perplexity"."""
        return {"loss": self.value, "perplexity": math.exp(self.value) if self.value < 700 else math.inf}


def _gathered(batches: Iterator[Predictions]) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return the logits, targets and mean loss of all examples."""
    outputs = [(batch.logits.cpu(), batch.targets.cpu(), batch.losses.cpu()) for batch in batches]
    logits, targets, losses = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    return logits, targets, float(losses.double().mean())


def _f1(truth: NDArray[Any], guesses: NDArray[Any]) -> dict[str, float]:
    """Return the mean F1 over the classes that occur, and the F1 of all classes pooled; nothing if none occurs.

    Args:
        truth: One class per example, (example,); or whether each class is a label, (example, class).
        guesses: Likewise.
    """
    if truth.ndim == 1:
        count = 1 + max(truth.max(), guesses.max())
        hits, *both = (np.bincount(each, minlength=count) for each in (truth[truth == guesses], truth, guesses))
    else:
        hits, *both = ((truth & guesses).sum(0), truth.sum(0), guesses.sum(0))
    found = both[0] + both[1]
    occurring = found > 0
    if not occurring.any():
        return {}
    macro = float(np.mean(2 * hits[occurring] / found[occurring]))
    return {"macro_f1": macro, "micro_f1": float(2 * hits.sum() / found.sum())}


def _auroc(truth: NDArray[Any], scores: NDArray[Any]) -> dict[str, float]:
    """Return the mean AUROC over the classes with both positive and negative examples."""
    both = np.flatnonzero(truth.any(0) & ~truth.all(0))
    if not len(both) or not np.isfinite(scores).all():
        return {}
    return {"auroc": _class_mean(ranking.auroc, truth, scores, both)}


def _auprc(truth: NDArray[Any], scores: NDArray[Any]) -> dict[str, float]:
    """Return the mean average precision over the classes with positive examples, and the one of all classes pooled."""
    occurring = np.flatnonzero(truth.any(0))
    if not len(occurring) or not np.isfinite(scores).all():
        return {}
    pooled = ranking.average_precision(truth.ravel(), scores.ravel(), np.ones((1, truth.size)))
    mean = _class_mean(ranking.average_precision, truth, scores, occurring)
    return {"macro_auprc": mean, "micro_auprc": float(pooled[0])}


def _class_mean(area: Area, truth: NDArray[Any], scores: NDArray[Any], classes: NDArray[np.intp]) -> float:
    """Return the mean over some classes of (example, class)."""
    once = np.ones((1, len(truth)))
    return float(np.mean([area(truth[:, place], scores[:, place], once)[0] for place in classes]))


def _r2(errors: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """Return the mean R² over the targets that vary. For a constant target it is undefined."""
    varies = targets.amin(0) < targets.amax(0)  # (target,)
    deviations = (targets - targets.mean(0)).square().sum(0)[varies]
    value = float((1 - errors.square().sum(0)[varies] / deviations).mean())  # NaN if no target varies
    return {"r2": value} if math.isfinite(value) else {}


TYPE_SCORES = ("precision", "recall", "f1", "relaxed_f1")  # the scores of a single entity type
_SEPARATOR = "/"  # no metric has it in its name


def type_score(metric: str, entity_type: str) -> str:
    """Return the name of a score of one entity type."""
    return f"{metric}{_SEPARATOR}{entity_type}"


def without_types(scores: Mapping[str, float]) -> dict[str, float]:
    """Return the scores that are not of a single entity type."""
    return {name: value for name, value in scores.items() if _SEPARATOR not in name}


def by_type(scores: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the scores of single entity types, by type and metric. "entities" is the number of true entities."""
    types: dict[str, dict[str, float]] = {}
    for name, value in scores.items():
        metric, separator, entity_type = name.partition(_SEPARATOR)
        if separator:
            types.setdefault(entity_type, {})[metric] = value
    return types


def _by_type(types: Sequence[str], counts: Sequence[Counts]) -> dict[str, float]:
    return {
        type_score(metric, entity_type): value
        for entity_type, of_type in zip(types, counts, strict=True)
        if (scores := of_type.scores())
        for metric, value in (("entities", of_type.true), *((name, scores[name]) for name in TYPE_SCORES))
    }
