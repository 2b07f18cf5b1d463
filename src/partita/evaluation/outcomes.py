"""What a model does on each example, kept so that every score of any subset or resample follows from it.

Most scores are functions of sums over examples: hits of a class, tokens, squared errors. AUROC and AUPRC rank all
examples instead. The user's own metrics are computed again for each resample.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from partita.core.data import IGNORE_INDEX
from partita.evaluation.bootstrap import Floats, Ints
from partita.evaluation.calibration import BINS, Reliability
from partita.evaluation.evaluator import Evaluator, Predictions, type_score

Area = Callable[[NDArray[Any], NDArray[Any], Floats], Floats]  # of `auroc` and `average_precision`


def auroc(truth: NDArray[Any], scores: NDArray[Any], weights: Floats) -> Floats:
    """Return the area under the ROC curve, (weighting,); NaN without positive or without negative examples.

    Args:
        truth: Whether each example is positive, (example,).
        scores: The score of each, (example,).
        weights: How often each counts, (weighting, example).
    """
    positive, negative = _by_score(truth, scores, weights, np.argsort(scores, kind="stable"))
    below = negative.cumsum(1) - negative
    pairs = positive.sum(1) * negative.sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        area: Floats = (positive * (below + negative / 2)).sum(1) / pairs
    return area


def average_precision(truth: NDArray[Any], scores: NDArray[Any], weights: Floats) -> Floats:
    """Return the mean precision over positive examples, each at the threshold of its own score; NaN without any.

    The arguments are as in `auroc`.
    """
    positive, negative = _by_score(truth, scores, weights, np.argsort(-scores, kind="stable"))
    found, ranked = positive.cumsum(1), (positive + negative).cumsum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        precision = np.where(ranked > 0, found / ranked, 0.0)
        mean: Floats = (positive * precision).sum(1) / found[:, -1]
    return mean


def _by_score(
    truth: NDArray[Any], scores: NDArray[Any], weights: Floats, order: NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """Return the weights of positive and of negative examples, each (weighting, distinct score), in order."""
    ranked, sorted_truth, sorted_weights = scores[order], truth[order].astype(bool), weights[:, order]
    first = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1]))
    positive, negative = (
        np.add.reduceat(np.where(chosen, sorted_weights, 0.0), first, axis=1)
        for chosen in (sorted_truth, ~sorted_truth)
    )
    return positive, negative


Columns = Mapping[
    str, Any
]  # blocks of numbers of each example, (example, column): arrays of NumPy or scipy, or Counted
Totals = Mapping[str, Floats]  # sums over examples of each block of columns, (weighting, column)
Formula = Callable[[Totals], dict[str, Floats]]


@dataclass(frozen=True, eq=False)
class Counted:
    """A block (example, column) of which most is zero: values, added at places of examples.

    Scores of a round need its sums once, and no scipy, which takes long to import.
    """

    rows: Ints
    places: Ints
    values: Floats
    shape: tuple[int, int]

    def sums(self, weights: Floats) -> Floats:
        """Return the weighted sums of all columns, (weighting, column)."""
        if len(weights) == 1:
            values = self.values * weights[0][self.rows]
            return np.bincount(self.places, values, self.shape[1])[None].astype(float)
        return np.asarray((self._matrix().T @ weights.T).T)

    def __getitem__(self, rows: Ints) -> Any:
        return self._matrix()[rows]

    def _matrix(self) -> Any:
        from scipy import sparse

        return sparse.coo_array((self.values, (self.rows, self.places)), self.shape).tocsr()  # adds what has one place


def weighted_sums(columns: Columns, weights: Floats) -> Totals:
    """Return the weighted sums of all columns, each (weighting, column)."""
    with np.errstate(invalid="ignore", over="ignore"):  # of a diverged model
        return {
            name: block.sums(weights) if isinstance(block, Counted) else (block.T @ weights.T).T
            for name, block in columns.items()
        }


@dataclass(frozen=True, eq=False)
class Confusion:
    """How often each true class was predicted as each class.

    Attributes:
        classes: The names of the classes.
        counts: (true class, predicted class).
        unit: What is counted: "examples", "words" or "pixels".
    """

    classes: tuple[str, ...]
    counts: Ints
    unit: str


@dataclass(frozen=True, eq=False)
class Outcomes:
    """The outcomes of a model on examples; a `Statistic`.

    Attributes:
        columns: What scores need the sums of.
        formula: Computes scores from the sums.
        others: Statistics that are no functions of sums.
        classes: Names of the classes, entity types or targets that have scores of their own, such as "f1/cat".
        confusion: Confusion of all examples; None if nothing is classified, or several labels at once.
    """

    columns: Columns
    formula: Formula
    others: tuple[Ranked | Recomputed, ...] = ()
    classes: tuple[str, ...] = ()
    confusion: Confusion | None = None

    def __len__(self) -> int:
        held = next(iter(self.columns.values()), None)
        return len(self.others[0]) if held is None else int(held.shape[0])

    def __call__(self, weights: Floats) -> dict[str, Floats]:
        scores = self.formula(weighted_sums(self.columns, weights))
        for other in self.others:
            scores |= other(weights)
        return scores

    def select(self, rows: Ints) -> Outcomes:
        """Return the outcomes of some examples, without their confusion."""
        columns = {name: block[rows] for name, block in self.columns.items()}
        return Outcomes(columns, self.formula, tuple(other.select(rows) for other in self.others), self.classes)

    def reliability(self) -> Reliability | None:
        """Return how sure the model is and how often it is right; None if it gives no probabilities."""
        if "bins" not in self.columns:
            return None
        sums = weighted_sums({"bins": self.columns["bins"]}, np.ones((1, len(self))))["bins"]
        return Reliability(*sums.reshape(3, BINS)) if np.isfinite(sums).all() else None


@dataclass(frozen=True, eq=False)
class Ranked:
    """AUROC, and for several labels also AUPRC, from the truth and the scores of each class, both (example, class)."""

    truth: NDArray[np.bool_]
    scores: Floats
    classes: Sequence[str]
    precision: bool

    def __len__(self) -> int:
        return len(self.truth)

    def __call__(self, weights: Floats) -> dict[str, Floats]:
        if not np.isfinite(self.scores).all():
            return {}
        areas = self._by_class(auroc, weights, np.asarray(self.truth.any(0) & ~self.truth.all(0)))
        found = {"auroc": class_mean(areas), **by_class("auroc", self.classes, areas)}
        if not self.precision:
            return found
        precisions = self._by_class(average_precision, weights, np.asarray(self.truth.any(0)))
        pooled = average_precision(self.truth.ravel(), self.scores.ravel(), np.repeat(weights, self.truth.shape[1], 1))
        return {
            **found,
            "macro_auprc": class_mean(precisions),
            "micro_auprc": pooled,
            **by_class("auprc", self.classes, precisions),
        }

    def _by_class(self, area: Area, weights: Floats, defined: NDArray[np.bool_]) -> Floats:
        """Return the area of each class in which it is defined, (weighting, class)."""
        found = np.full((len(weights), len(defined)), np.nan)
        for place in np.flatnonzero(defined):
            found[:, place] = area(self.truth[:, place], self.scores[:, place], weights)
        return found

    def select(self, rows: Ints) -> Ranked:
        return Ranked(self.truth[rows], self.scores[rows], self.classes, self.precision)


@dataclass(frozen=True, eq=False)
class Recomputed:
    """Scores of any function of predictions, computed again for each resample."""

    function: Callable[[Predictions], Mapping[str, float]]
    seen: Predictions

    def __len__(self) -> int:
        return len(self.seen.targets)

    def __call__(self, weights: Floats) -> dict[str, Floats]:
        rows = [self._scores(np.repeat(np.arange(len(self)), row.astype(np.int64))) for row in weights]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}

    def _scores(self, rows: Ints) -> Mapping[str, float]:
        return self.function(self.select(rows).seen)

    def select(self, rows: Ints) -> Recomputed:
        chosen, seen = torch.from_numpy(rows), self.seen
        return Recomputed(self.function, Predictions(seen.logits[chosen], seen.targets[chosen], seen.losses[chosen]))


@runtime_checkable
class KeepsOutcomes(Protocol):
    """An evaluator that says what to keep of each example. One that does not is called again for each resample."""

    def outcomes(self, batches: Iterator[Predictions], classes: tuple[str, ...]) -> Outcomes: ...


def outcomes(evaluator: Evaluator, batches: Iterator[Predictions], classes: tuple[str, ...]) -> Outcomes:
    """Keep what a model does on each example.

    Args:
        evaluator: The task's evaluator, which says which scores there are.
        batches: The predictions, for at least one example.
        classes: The names of the task's outputs.
    """
    if isinstance(evaluator, KeepsOutcomes):
        return evaluator.outcomes(batches, classes)
    made = Recomputed(lambda batch: evaluator(iter([batch])), joined(list(batches)))
    return Outcomes({}, lambda totals: {}, (made,), classes)


def joined(seen: Sequence[Predictions]) -> Predictions:
    """Join the predictions of batches, on the CPU."""
    parts = ([getattr(batch, name).cpu() for batch in seen] for name in ("logits", "targets", "losses"))
    return Predictions(*map(join_batches, parts))


def join_batches(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join batches (example, ...). Batches of texts can differ in length, and are padded at the end."""
    if len({part.shape[1:] for part in parts}) > 1:
        longest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
        parts = [_padded(part, longest) for part in parts]
    return torch.cat(list(parts))


def _padded(part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    # Targets are padded with the index that losses ignore.
    empty = part.new_full((part.shape[0], *sizes), 0 if part.is_floating_point() else IGNORE_INDEX)
    empty[tuple(slice(size) for size in part.shape)] = part
    return empty


def ratio(part: Floats, whole: Floats, empty: float = np.nan) -> Floats:
    """Divide, with a value of its own where the whole is zero."""
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Floats = np.where(whole == 0, empty, part / whole)
    return found


def class_mean(values: Floats) -> Floats:
    """Return the mean over classes in which a score is defined, (weighting,)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of rows without any defined value
        found: Floats = np.nanmean(values, 1)
    return found


def by_class(metric: str, classes: Sequence[str], values: Floats) -> dict[str, Floats]:
    """Return the values of each class, (weighting, class), by the name of its own score, such as "f1/cat".

    There are none without names of classes.
    """
    return {type_score(metric, name): own for name, own in zip(classes, values.T, strict=bool(classes))}
