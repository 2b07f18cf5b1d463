"""Evaluators of classes, entities, next tokens and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from partita.core.data import IGNORE_INDEX
from partita.evaluation.bootstrap import Floats
from partita.evaluation.by_example import ByExample, Kept, bins_block, counted, mean_of, means
from partita.evaluation.calibration import calibration_error
from partita.evaluation.confusion import confusion_matrix
from partita.evaluation.entities import TagScheme
from partita.evaluation.evaluator import Predictions, by_type, type_score, without_types
from partita.evaluation.outcomes import Columns, Confusion, Counted, Ranked, Totals, by_class, class_mean, ratio
from partita.record.metric import ACCURACY, Metric

LOSS = Metric("loss", higher_is_better=False, fraction=False)
PERPLEXITY = Metric("perplexity", higher_is_better=False, fraction=False)
MSE = Metric("mse", higher_is_better=False, fraction=False)
MAE = Metric("mae", higher_is_better=False, fraction=False)
ECE = Metric("ece", higher_is_better=False)
R2 = Metric("r2", fraction=False)  # at most 1, and negative if the mean of the targets would be a better prediction
MACRO_F1, MICRO_F1, AUROC = map(Metric, ("macro_f1", "micro_f1", "auroc"))
MACRO_AUPRC, MICRO_AUPRC = map(Metric, ("macro_auprc", "micro_auprc"))
# Scores of a test on classes that no client trained on; its harmonic mean is with the score on the others.
NEW_CLASS_METRICS = (Metric("new_accuracy"), Metric("harmonic_mean"))
TYPE_SCORES = ("precision", "recall", "f1", "relaxed_f1")  # the scores of a single entity type


@dataclass(frozen=True)
class SingleLabel(ByExample):
    """Single-label classification. Macro averages are over the classes that occur. AUROC is one-vs-rest."""

    metrics: ClassVar[tuple[Metric, ...]] = (ACCURACY, ECE, MACRO_F1, MICRO_F1, AUROC, LOSS)
    whole: ClassVar[bool] = True

    def keep(self, batch: Predictions, first: int, details: bool) -> Kept:
        logits, targets = batch.logits, batch.targets
        guesses = logits.argmax(-1)
        top = logits.gather(-1, guesses.unsqueeze(-1)).squeeze(-1)
        sure = (top - logits.logsumexp(-1)).exp()
        kept = {"guesses": guesses, "sure": sure, "targets": targets, "losses": batch.losses}
        if details:
            kept["brier"] = _squared(logits, targets)
        return {**kept, "logits": logits} if details or self.whole else kept

    def columns(self, kept: Kept) -> Columns:
        guesses, targets = kept["guesses"], kept["targets"]
        right, rows, count = guesses == targets, torch.arange(len(targets)), len(targets)
        columns: dict[str, Floats | Counted] = {
            "accuracy": mean_of(right),
            "loss": mean_of(kept["losses"]),
            "bins": bins_block(rows, kept["sure"], right, count),
        }
        if "brier" in kept:
            columns["brier"] = mean_of(kept["brier"])
        if "logits" in kept:
            shape = (count, kept["logits"].shape[1])
            columns["true"] = counted(rows, targets, shape)
            columns["predicted"] = counted(rows, guesses, shape)
            columns["hits"] = counted(rows[right], targets[right], shape)
        return columns

    def formula(self, totals: Totals, classes: Sequence[str]) -> dict[str, Floats]:
        return {
            **means(totals, "accuracy", "loss", "brier"),
            **_class_scores(totals, classes),
            **calibration_error(totals),
        }

    def others(self, kept: Kept, classes: Sequence[str]) -> tuple[Ranked, ...]:
        if "logits" not in kept:
            return ()
        logits = kept["logits"]
        truth = torch.nn.functional.one_hot(kept["targets"], logits.shape[1]).bool()
        return (Ranked(truth.numpy(), logits.softmax(1).numpy(), classes, precision=False),)

    def confusion(self, kept: Kept, classes: tuple[str, ...]) -> Confusion:
        return Confusion(classes, _pairs(kept["targets"], kept["guesses"], len(classes)), "examples")

    def decisions(self, batch: Predictions) -> tuple[torch.Tensor, torch.Tensor] | None:
        return batch.logits.argmax(-1), batch.targets


@dataclass(frozen=True)
class Accuracy(SingleLabel):
    """Accuracy, calibration error and mean loss only: cheap for large test sets."""

    metrics: ClassVar[tuple[Metric, ...]] = (ACCURACY, ECE, LOSS)
    batch: ClassVar[int] = 512  # large, because no activations are kept for a backward pass
    whole: ClassVar[bool] = False


@dataclass(frozen=True)
class MultiLabel(ByExample):
    """Multi-label classification. Macro averages are over the classes that occur.

    F1 is for the threshold 0.5. AUROC and AUPRC need none; AUPRC is the average precision, and its micro average ranks
    all pairs of an example and a class in one list.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (MICRO_F1, MACRO_F1, AUROC, MACRO_AUPRC, MICRO_AUPRC, LOSS)
    whole: ClassVar[bool] = True

    def keep(self, batch: Predictions, first: int, details: bool) -> Kept:
        kept = {"logits": batch.logits, "targets": batch.targets, "losses": batch.losses}
        return {**kept, "chances": batch.logits.double().sigmoid()} if details else kept

    def columns(self, kept: Kept) -> Columns:
        truth, told = kept["targets"].bool(), kept["logits"] > 0  # (example, class)
        columns: dict[str, Floats | Counted] = {"loss": mean_of(kept["losses"])}
        for name, chosen in (("true", truth), ("predicted", told), ("hits", truth & told)):
            rows, places = chosen.nonzero(as_tuple=True)
            columns[name] = counted(rows, places, (len(chosen), chosen.shape[1]))
        if "chances" in kept:
            chances, rows = kept["chances"], torch.arange(len(truth)).unsqueeze(1).expand_as(truth)
            columns["brier"] = mean_of((chances - truth.double()).square().mean(1))
            columns["bins"] = bins_block(rows.reshape(-1), chances.reshape(-1), truth.reshape(-1), len(truth))
        return columns

    def formula(self, totals: Totals, classes: Sequence[str]) -> dict[str, Floats]:
        return {**means(totals, "loss", "brier"), **_class_scores(totals, classes), **calibration_error(totals)}

    def others(self, kept: Kept, classes: Sequence[str]) -> tuple[Ranked, ...]:
        return (Ranked(kept["targets"].bool().numpy(), kept["logits"].numpy(), classes, precision=True),)

    def decisions(self, batch: Predictions) -> tuple[torch.Tensor, torch.Tensor] | None:
        return (batch.logits > 0).long(), batch.targets.long()  # (example, class)


@dataclass(frozen=True)
class Entities(ByExample):
    """Entity scores from BIO tags, of all types together and of each type.

    Strict matching is as in seqeval's strict mode: the type and all words of an entity must match. Relaxed matching is
    as in the i2b2 and n2c2 challenges: the type must match, and one word is enough. A true entity counts for one
    predicted entity, so two halves of it are one match and one error.

    Attributes:
        tags: The name of each class, such as "B-person", in the order of the logits.
    """

    tags: tuple[str, ...]

    metrics: ClassVar[tuple[Metric, ...]] = (
        *map(Metric, ("f1", "precision", "recall", "relaxed_precision", "relaxed_recall", "relaxed_f1")),
        ACCURACY,
        LOSS,
    )

    def keep(self, batch: Predictions, first: int, details: bool) -> Kept:
        logits, targets = batch.logits, batch.targets  # (example, token, class), (example, token)
        kept = {"guesses": logits.argmax(-1), "targets": targets, "losses": batch.losses}
        if not details:
            return kept
        top = logits.double().amax(-1) - logits.double().logsumexp(-1)
        squared = _squared(logits, targets.clamp(min=0)) * (targets != IGNORE_INDEX)
        return {**kept, "sure": top.exp(), "squared": squared.sum(1)}

    def columns(self, kept: Kept) -> Columns:
        guesses, targets = kept["guesses"], kept["targets"]
        valid = targets != IGNORE_INDEX
        number, right, rows = valid.sum(1), (guesses == targets) & valid, valid.nonzero()[:, 0]
        first = (valid & (valid.cumsum(1) == 1))[valid].numpy()  # (token,)
        scheme = TagScheme(self.tags)
        true, told = (scheme.spans(tags[valid].numpy(), first) for tags in (targets, guesses))
        columns: dict[str, Floats | Counted] = {
            "accuracy": mean_of(right.sum(1), number),
            "loss": mean_of(kept["losses"] * number, number),
            "entities": scheme.count(true, told, rows.numpy(), len(targets)).reshape(-1, 4 * len(scheme.types)),
        }
        if "sure" in kept:
            columns["brier"] = mean_of(kept["squared"], number)
            columns["bins"] = bins_block(rows, kept["sure"][valid], right[valid], len(targets))
        return columns

    def formula(self, totals: Totals, classes: Sequence[str]) -> dict[str, Floats]:
        types, sums = TagScheme(self.tags).types, totals["entities"]
        own = sums.reshape(len(sums), len(types), 4)  # (weighting, type, count)
        of_types = {"entities": own[..., 0], **_entity_scores(own)}
        found = {
            **means(totals, "accuracy", "loss", "brier"),
            **_entity_scores(own.sum(1)),
            **calibration_error(totals),
        }
        for metric in ("entities", *TYPE_SCORES):
            found |= by_class(metric, types, of_types[metric])
        return found

    def titles(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        return TagScheme(self.tags).types

    def confusion(self, kept: Kept, classes: tuple[str, ...]) -> Confusion:
        scheme, valid = TagScheme(self.tags), kept["targets"] != IGNORE_INDEX
        kinds = torch.from_numpy(scheme.type_of) + 1  # 0 is no entity
        true, told = (kinds[kept[name][valid]] for name in ("targets", "guesses"))
        return Confusion(("O", *scheme.types), _pairs(true, told, 1 + len(scheme.types)), "words")

    def decisions(self, batch: Predictions) -> tuple[torch.Tensor, torch.Tensor] | None:
        valid = batch.targets != IGNORE_INDEX
        return batch.logits.argmax(-1)[valid], batch.targets[valid]  # (token,)

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]:
        scores = super().__call__(batches)
        types = {
            name: {**own, "entities": int(own["entities"])} for name, own in by_type(scores).items() if "f1" in own
        }
        found = {type_score(metric, name): value for name, own in types.items() for metric, value in own.items()}
        return without_types(scores) | found  # without types that neither occur nor are predicted


@dataclass(frozen=True)
class NextToken(ByExample):
    """Mean loss per token, and its exponential, the perplexity. Other evaluators add means over examples."""

    metrics: ClassVar[tuple[Metric, ...]] = (PERPLEXITY, LOSS)
    batch: ClassVar[int] = 16  # logits are as wide as the vocabulary

    def keep(self, batch: Predictions, first: int, details: bool) -> Kept:
        return {"tokens": (batch.targets != IGNORE_INDEX).sum(1), "losses": batch.losses}

    def columns(self, kept: Kept) -> Columns:
        added = kept.keys() - {"tokens", "losses", "scored"}
        return {
            **{name: mean_of(kept[name], kept.get("scored")) for name in kept if name in added},
            "loss": mean_of(kept["losses"] * kept["tokens"], kept["tokens"]),
        }

    def formula(self, totals: Totals, classes: Sequence[str]) -> dict[str, Floats]:
        found = means(totals, *totals)
        loss, count = found["loss"], totals["loss"][:, 0]
        with np.errstate(over="ignore"):
            perplexity = np.where(loss < 700, np.exp(loss), np.inf)
        return {**found, "perplexity": np.where(count > 0, perplexity, np.nan)}

    def titles(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class Regression(ByExample):
    """Errors in the units of the targets, as means over targets. R² is a mean over the targets that vary."""

    # Not R² first: it is undefined for a single example, and a client whose targets hardly vary would dominate means.
    metrics: ClassVar[tuple[Metric, ...]] = (MSE, MAE, R2, LOSS)
    whole: ClassVar[bool] = True

    def keep(self, batch: Predictions, first: int, details: bool) -> Kept:
        return {"guesses": batch.logits, "targets": batch.targets, "losses": batch.losses}

    def columns(self, kept: Kept) -> Columns:
        errors = kept["guesses"] - kept["targets"]  # (example, target)
        centered = kept["targets"] - kept["targets"].mean(0)  # for precision
        return {
            "mse": mean_of(errors.square()),
            "mae": mean_of(errors.abs()),
            "loss": mean_of(kept["losses"]),
            "targets": mean_of(centered),
            "spread": mean_of(centered.square()),
        }

    def formula(self, totals: Totals, classes: Sequence[str]) -> dict[str, Floats]:
        mse, mae, center, square = (
            ratio(totals[name][:, 1:], totals[name][:, :1]) for name in ("mse", "mae", "targets", "spread")
        )  # (weighting, target)
        spread = square - center**2
        varies = spread > 1e-12 * square.clip(min=1e-300)
        r2 = np.where(varies, 1 - ratio(mse, np.where(varies, spread, np.nan)), np.nan)
        found = {
            **means(totals, "loss"),
            "mse": mse.mean(1),
            "mae": mae.mean(1),
            "r2": np.where(np.isfinite(mse).all(1), class_mean(r2), np.nan),
        }
        return found | by_class("mse", classes, mse) | by_class("mae", classes, mae) | by_class("r2", classes, r2)

    def titles(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        return classes if len(classes) > 1 else ()


def _squared(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the squared distance of the probabilities from the truth, of which the Brier score is the mean."""
    return (logits.double().softmax(-1) - torch.nn.functional.one_hot(targets, logits.shape[-1])).square().sum(-1)


def _pairs(true: torch.Tensor, predicted: torch.Tensor, size: int) -> NDArray[np.int64]:
    """Return how often each true class was predicted as each class, (true class, predicted class)."""
    return confusion_matrix(predicted, true, size).numpy()


def _class_scores(totals: Totals, classes: Sequence[str]) -> dict[str, Floats]:
    """Return F1 of all classes and scores of each, if labels are counted. Scores of a class that is absent are NaN."""
    if "true" not in totals:
        return {}
    hits, true, predicted = totals["hits"], totals["true"], totals["predicted"]  # (weighting, class)
    both = true + predicted
    f1 = ratio(2 * hits, both)
    precision, recall = (np.where(both > 0, ratio(hits, of, 0.0), np.nan) for of in (predicted, true))
    return {
        "macro_f1": class_mean(f1),
        "micro_f1": ratio(2 * hits.sum(1), both.sum(1)),
        **by_class("examples", classes, true),
        **by_class("precision", classes, precision),
        **by_class("recall", classes, recall),
        **by_class("f1", classes, f1),
    }


def _entity_scores(counts: Floats) -> dict[str, Floats]:
    """Return the scores of strict and of relaxed matching from counts of entities, (..., 4) as in `TagScheme.count`."""
    true, predicted, *right = np.moveaxis(counts, -1, 0)
    defined, scores = true + predicted > 0, {}
    for prefix, hits in zip(("", "relaxed_"), right, strict=True):
        precision, recall = ratio(hits, predicted, 0.0), ratio(hits, true, 0.0)
        f1 = ratio(2 * precision * recall, precision + recall, 0.0)
        for metric, values in (("precision", precision), ("recall", recall), ("f1", f1)):
            scores[prefix + metric] = np.where(defined, values, np.nan)
    return scores
