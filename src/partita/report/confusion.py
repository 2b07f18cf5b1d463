"""Which class the last test, and the best one, takes for which other class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partita.report.load import RunRecord, by_label

MAX_CELLS = 30_000  # of all matrices of a page
SHADES = 10  # CSS classes shade-0 to shade-10
LISTED = 5  # most frequent confusions in words


@dataclass(frozen=True)
class Matrix:
    """A confusion matrix, summed over seeds."""

    title: str
    classes: Sequence[str]
    counts: Sequence[Sequence[int]]  # (true class, predicted class)

    @property
    def shades(self) -> list[list[int]]:
        """How strong the color of each cell is: the share of the true class, from 0 to SHADES."""
        return [[round(SHADES * count / max(sum(row), 1)) for count in row] for row in self.counts]

    @property
    def recalls(self) -> list[str]:
        """Share of each true class that is recognized."""
        return [_percent(row[place], sum(row)) for place, row in enumerate(self.counts)]

    @property
    def precisions(self) -> list[str]:
        """Share of the predictions of each class that are right."""
        columns = list(zip(*self.counts, strict=True))
        return [_percent(column[place], sum(column)) for place, column in enumerate(columns)]

    @property
    def worst(self) -> str:
        """The most frequent confusions, in words."""
        wrong = [
            (count, true, said)
            for true, row in enumerate(self.counts)
            for said, count in enumerate(row)
            if count and true != said
        ]
        told = [
            f"{self.classes[true]} as {self.classes[said]} ({count} of {sum(self.counts[true])})"
            for count, true, said in sorted(wrong, key=lambda each: -each[0])[:LISTED]
        ]
        return f"Most often confused: {', '.join(told)}." if told else "No example is confused."


def confusion_data(records: Sequence[RunRecord]) -> Mapping[str, Any] | None:
    """Return the confusion matrices of each label: of the last test, and of the best round if that is another one."""
    matrices: list[Matrix] = []
    left, room = [], MAX_CELLS
    for label, runs in by_label(records).items():
        lasts = [counts for run in runs for row in run.rows[-1:] if (counts := row.get("confusion"))]
        bests = [
            counts
            for run in runs
            for row in run.rows[:-1]
            if (counts := row.get("confusion")) and run.best == row["round"] + 1
        ]
        for what, found in (("last test", lasts), ("best round on validation", bests)):
            if not found:
                continue
            classes = found[0]["classes"]
            same = [each["counts"] for each in found if each["classes"] == classes]
            room -= len(classes) ** 2
            if room < 0:
                left.append(label)
                continue
            summed = [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*same, strict=True)]
            seeds = f"{len(same)} seeds together" if len(same) > 1 else "one seed"
            matrices.append(Matrix(f"{label}: {what}, {seeds}", classes, summed))
    if not matrices:
        return None
    notes = [f"{', '.join(dict.fromkeys(left))}: left out, because the page would be too large."] if left else []
    return {"matrices": matrices, "notes": notes}


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}" if whole else "–"
