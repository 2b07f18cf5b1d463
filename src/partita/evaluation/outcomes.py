"""What a model does on each example, kept so that every score of any subset or resample follows from it.

Most scores are functions of sums over examples: hits of a class, tokens, squared errors. AUROC and AUPRC rank all
examples instead. The user's own metrics are computed again for each resample.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partita.evaluation import ranking
from partita.evaluation.bootstrap import Floats, Ints
from partita.evaluation.calibration import BINS, Reliability
from partita.evaluation.metrics import Predictions, type_score

Totals = Mapping[str, Floats]  # sums over examples of each block of columns, (weighting, column)
Formula = Callable[[Totals], dict[str, Floats]]


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
        columns: Blocks of numbers of each example, (example, column), that scores need the sums of.
        formulas: Compute scores from the sums.
        others: Statistics that are no functions of sums.
        classes: Names of the classes, entity types or targets that have scores of their own, such as "f1/cat".
        confusion: Confusion of all examples; None if nothing is classified, or several labels at once.
    """

    columns: Mapping[str, Any]  # scipy.sparse.csr_array
    formulas: tuple[Formula, ...]
    others: tuple[Ranked | Recomputed, ...] = ()
    classes: tuple[str, ...] = ()
    confusion: Confusion | None = None

    def __len__(self) -> int:
        return int(next(iter(self.columns.values())).shape[0])

    def totals(self, weights: Floats) -> Totals:
        """Return the weighted sums of all columns, each (weighting, column)."""
        return {name: (block.T @ weights.T).T for name, block in self.columns.items()}

    def __call__(self, weights: Floats) -> dict[str, Floats]:
        totals = self.totals(weights)
        scores: dict[str, Floats] = {}
        for formula in self.formulas:
            scores |= formula(totals)
        for other in self.others:
            scores |= other(weights)
        return scores

    def select(self, rows: Ints) -> Outcomes:
        """Return the outcomes of some examples, without their confusion."""
        columns = {name: block[rows] for name, block in self.columns.items()}
        return Outcomes(columns, self.formulas, tuple(other.select(rows) for other in self.others), self.classes)

    def reliability(self) -> Reliability | None:
        """Return how sure the model is and how often it is right; None if it gives no probabilities."""
        if "bins" not in self.columns:
            return None
        bins = self.totals(np.ones((1, len(self))))["bins"][0].reshape(3, BINS)
        return Reliability(*bins)


@dataclass(frozen=True, eq=False)
class Ranked:
    """AUROC, and for several labels also AUPRC, from the truth and the scores of each class, both (example, class)."""

    truth: NDArray[np.bool_]
    scores: Floats
    classes: tuple[str, ...]
    precision: bool

    def __len__(self) -> int:
        return len(self.truth)

    def __call__(self, weights: Floats) -> dict[str, Floats]:
        if not np.isfinite(self.scores).all():
            return {}
        pairs = list(zip(self.truth.T, self.scores.T, strict=True))
        areas = np.stack([ranking.auroc(truth, scores, weights) for truth, scores in pairs], 1)  # (weighting, class)
        found = {"auroc": class_mean(areas), **by_class("auroc", self.classes, areas)}
        if not self.precision:
            return found
        precisions = np.stack([ranking.average_precision(truth, scores, weights) for truth, scores in pairs], 1)
        pooled = ranking.average_precision(
            self.truth.ravel(), self.scores.ravel(), np.repeat(weights, len(self.classes), 1)
        )
        return {
            **found,
            "macro_auprc": class_mean(precisions),
            "micro_auprc": pooled,
            **by_class("auprc", self.classes, precisions),
        }

    def select(self, rows: Ints) -> Ranked:
        return Ranked(self.truth[rows], self.scores[rows], self.classes, self.precision)


@dataclass(frozen=True, eq=False)
class Recomputed:
    """Scores of any function of predictions, computed again for each resample."""

    function: Callable[[Predictions], Mapping[str, float]]
    logits: torch.Tensor
    targets: torch.Tensor
    losses: torch.Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def __call__(self, weights: Floats) -> dict[str, Floats]:
        rows = [self._scores(np.repeat(np.arange(len(self)), row.astype(np.int64))) for row in weights]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}

    def _scores(self, rows: Ints) -> Mapping[str, float]:
        chosen = torch.from_numpy(rows)
        return self.function(Predictions(self.logits[chosen], self.targets[chosen], self.losses[chosen]))

    def select(self, rows: Ints) -> Recomputed:
        chosen = torch.from_numpy(rows)
        return Recomputed(self.function, self.logits[chosen], self.targets[chosen], self.losses[chosen])


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
    """Return the values of each class, (weighting, class), by the name of its own score, such as "f1/cat"."""
    return {type_score(metric, name): own for name, own in zip(classes, values.T, strict=True)}
