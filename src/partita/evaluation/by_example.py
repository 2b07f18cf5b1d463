"""Evaluators whose scores follow from numbers that are kept of each example.

Such an evaluator has one formula. In a round it gets the sums over all examples. For intervals and groups it gets the
sums of the same numbers over resamples and subsets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeAlias

import numpy as np
import torch

from partita.evaluation.bootstrap import Floats
from partita.evaluation.calibration import BINS, bins_of
from partita.evaluation.evaluator import Predictions
from partita.evaluation.outcomes import (
    Columns,
    Confusion,
    Counted,
    Outcomes,
    Ranked,
    Totals,
    join_batches,
    ratio,
    weighted_sums,
)
from partita.record.metric import Metric

NUMBERS_KEPT = 2**20  # on the device; then they are moved to the CPU, and summed if sums are enough

Kept: TypeAlias = "Mapping[str, torch.Tensor]"  # what is kept of examples, each (example, ...)


@dataclass(frozen=True)
class ByExample:
    """An evaluator whose scores follow from numbers that are kept of each example.

    Attributes:
        metrics: The scores of a round. The first one judges a run.
        batch: The batch size for evaluation.
        whole: Whether scores need the examples together, because they rank or center them. Otherwise a round keeps sums
            only, and its memory does not grow with the number of examples.
    """

    metrics: ClassVar[tuple[Metric, ...]]
    batch: ClassVar[int] = 64
    whole: ClassVar[bool] = False

    @property
    def primary(self) -> Metric:
        """The metric that a run is judged by."""
        return self.metrics[0]

    def keep(self, batch: Predictions, first: int, details: bool) -> Kept:
        """Return what to keep of a batch, on its device. A device should not have to wait for it.

        Args:
            batch: The batch.
            first: The number of its first example.
            details: Whether to keep what only scores outside `metrics` need too.
        """
        raise NotImplementedError

    def columns(self, kept: Kept) -> Columns:
        """Return the numbers of each example that the formula needs sums of.

        A block of the name of a score is that of a mean: how much each example counts, and its weighted values.

        Args:
            kept: What was kept, on the CPU. Floats are doubles.
        """
        raise NotImplementedError

    def formula(self, totals: Totals, classes: Sequence[str]) -> dict[str, Floats]:
        """Return scores for several weightings, each (weighting,). A score is NaN where it is undefined.

        Args:
            totals: The weighted sums of the columns.
            classes: Names of the classes that get scores of their own, such as "f1/cat"; empty for none.
        """
        raise NotImplementedError

    def others(self, kept: Kept, classes: Sequence[str]) -> tuple[Ranked, ...]:
        """Return the statistics that are no functions of sums."""
        return ()

    def titles(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the classes, entity types or targets that have scores of their own."""
        return classes

    def confusion(self, kept: Kept, classes: tuple[str, ...]) -> Confusion | None:
        """Return the confusion of all examples; None if nothing is classified, or several labels at once."""
        return None

    def decisions(self, batch: Predictions) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what is predicted and what is true, as `Evaluator.decisions` does."""
        return None

    def __call__(self, batches: Iterator[Predictions]) -> dict[str, float]:
        totals: dict[str, Floats] = {}
        others: tuple[Ranked, ...] = ()
        for kept in self._kept(batches, self.whole, details=False):
            columns = self.columns(kept)
            once = np.ones((1, len(next(iter(kept.values())))))
            for name, sums in weighted_sums(columns, once).items():
                totals[name] = totals[name] + sums if name in totals else sums
            others = self.others(kept, ())
        scores = self.formula(totals, ())
        for other in others:
            scores |= other(np.ones((1, len(other))))
        order = dict.fromkeys(metric.name for metric in self.metrics if metric.name in scores)
        found = {name: float(scores[name][0]) for name in {**order, **scores}}
        return {name: value for name, value in found.items() if value == value or _diverged(totals.get(name))}

    def outcomes(self, batches: Iterator[Predictions], classes: tuple[str, ...]) -> Outcomes:
        """Keep what a model does on each example.

        Args:
            batches: The predictions, for at least one example.
            classes: The names of the task's outputs.
        """
        [kept] = self._kept(batches, whole=True, details=True)
        names = self.titles(classes)
        formula = partial(self.formula, classes=names)
        return Outcomes(self.columns(kept), formula, self.others(kept, names), names, self.confusion(kept, classes))

    def _kept(self, batches: Iterator[Predictions], whole: bool, details: bool) -> Iterator[Kept]:
        """Yield what is kept, on the CPU: of all examples together, or else of some batches at a time."""
        held, moved = list[Kept](), list[Kept]()
        first = size = 0
        for batch in batches:
            held.append(self.keep(batch, first, details))
            first += len(batch.targets)
            size += sum(each.numel() for each in held[-1].values())
            if size >= NUMBERS_KEPT:
                moved.append(_moved(_joined(held)))
                held, size = [], 0
                if not whole:
                    yield moved.pop()
        if held:
            moved.append(_moved(_joined(held)))
        if moved:
            yield _joined(moved)


def _diverged(mean: Floats | None) -> bool:
    """Return whether a mean is NaN because a value is, and not because it is undefined."""
    return mean is not None and bool(mean[0, 0] > 0 and np.isnan(mean).any())


def _joined(parts: Sequence[Kept]) -> Kept:
    if len(parts) == 1:
        return parts[0]
    return {name: join_batches([part[name] for part in parts]) for name in parts[0]}


def _moved(kept: Kept) -> Kept:
    moved = {name: each.cpu() for name, each in kept.items()}
    return {name: each.double() if each.is_floating_point() else each for name, each in moved.items()}


# ---- blocks of columns


def mean_of(sums: torch.Tensor, counts: torch.Tensor | None = None) -> Floats:
    """Return the block of a mean, (example, 1 + value).

    Args:
        sums: The value or values of each example, (example,) or (example, value); summed over what it counts for.
        counts: How much each example counts, (example,). Default: 1.
    """
    parts = (torch.ones(len(sums)) if counts is None else counts, sums)
    return np.column_stack([part.double().numpy() for part in parts])


def counted(
    rows: torch.Tensor, places: torch.Tensor, shape: tuple[int, int], values: torch.Tensor | None = None
) -> Counted:
    """Return the block (example, column) with 1, or else the values, added at each place of an example."""
    numbers = np.ones(len(rows)) if values is None else values.double().numpy()
    return Counted(rows.numpy(), places.numpy(), numbers, shape)


def means(totals: Totals, *names: str) -> dict[str, Floats]:
    """Return the means of single values, of those blocks that there are."""
    return {name: ratio(totals[name][:, 1], totals[name][:, 0]) for name in names if name in totals}


def bins_block(rows: torch.Tensor, sure: torch.Tensor, right: torch.Tensor, count: int) -> Counted:
    """Return the block "bins" of predictions: for each bin their number, probabilities and hits."""
    place = bins_of(sure)
    places = torch.cat([place, place + BINS, place + 2 * BINS])
    values = torch.cat([torch.ones_like(sure), sure, right.to(sure.dtype)])
    return counted(rows.repeat(3), places, (count, 3 * BINS), values)
