"""Tables of counts of a site's data. Their cells are known without looking at the data, except for class names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partita.core.data import text_lengths
from partita.core.options import closest_match
from partita.data import DataError, Task

Ints = NDArray[np.int64]
QUANTILES = (10, 50, 90)  # in percent
ROWS, CLASSES, TOKENS = "rows", "classes", "tokens"


@dataclass(frozen=True, eq=False)
class CountTable:
    """Which rows are in which cells.

    Attributes:
        name: Name of the table.
        cells: Names of the cells.
        rows: A row for each entry, (entry,). A row with several classes has several entries.
        places: The cell of each entry, (entry,).
        per_row: Largest number of cells that one row can change.
    """

    name: str
    cells: tuple[str, ...]
    rows: Ints
    places: Ints
    per_row: int = 1

    def counts(self) -> list[int]:
        """Return the number of rows in each cell."""
        return [int(count) for count in np.bincount(self.places, minlength=len(self.cells))]

    def unit_counts(self, units: Ints) -> list[int]:
        """Return the number of distinct units in each cell, given the unit of each row."""
        pairs = np.unique(np.stack([self.places, units[self.rows]]), axis=1)
        return [int(count) for count in np.bincount(pairs[0], minlength=len(self.cells))]


def typical_cells(cells: Mapping[str, int | None], least: int = 0) -> dict[str, str]:
    """Return the cells that hold quantiles of a table whose cells are in order.

    Args:
        cells: The counts, None where unknown.
        least: A quantile is left out if fewer than this many are beyond it.
    """
    counts, names = np.array([count or 0 for count in cells.values()]), list(cells)
    total = int(counts.sum())
    return {
        f"{share}%": names[int(np.searchsorted(counts.cumsum() * 100, total * share))]
        for share in QUANTILES
        if total and total * min(share, 100 - share) >= 100 * least
    }


def tables_of(task: Task) -> list[CountTable]:
    """Return the tables of all rows on this machine: those that clients share, and those that are held out.

    Which rows are held out depends on the number of rows, so counts of one part could change a lot with one row more.
    """
    count = _row_count(task.train) + _row_count(task.test)
    rows = CountTable(ROWS, ("all",), np.arange(count), np.zeros(count, np.int64))
    return [rows, *(table for table in (_class_table(task), _token_table(task)) if table is not None)]


def _class_table(task: Task) -> CountTable | None:
    """Return how many rows have each class, also of those held out; None if the task has no classes."""
    if task.kind.outputs != "classes" or not task.classes:
        return None
    count = len(task.classes)
    rows, places = _classes_of(task.train, count)
    held_out, more = _classes_of(task.test, count)
    rows, places = torch.cat([rows, held_out + _row_count(task.train)]), torch.cat([places, more])
    return CountTable(CLASSES, task.classes, rows.numpy(), places.numpy(), 1 if task.kind.one_class else count)


def _token_table(task: Task) -> CountTable | None:
    """Return how many texts have how many tokens without special ones; None if the inputs are not texts.

    The last cell holds texts that reach the limit, at which they are cut.
    """
    train, test = _token_lengths(task.train), _token_lengths(task.test)
    if train is None or test is None:
        return None
    special = getattr(task.tokenizer, "num_special_tokens_to_add", lambda: 0)()
    last = token_limit(task) - special - 1
    ends = [0]  # the last number of each cell but the last
    while (end := max(16, 2 * ends[-1])) < last:
        ends.append(end)
    ends += [last] if ends[-1] < last else []
    starts = [0, *(end + 1 for end in ends)]
    cells = [str(low) if low == high else f"{low} to {high}" for low, high in zip(starts, ends, strict=False)]
    counted = (torch.cat([train, test]) - special).clamp(min=0).numpy()
    places = np.searchsorted(np.array(ends), counted)
    return CountTable(TOKENS, (*cells, f"{starts[-1]} or more"), np.arange(len(counted)), places)


def token_limit(task: Task) -> int:
    """Return the maximum number of tokens of a text; 0 if the inputs are not texts."""
    return int(getattr(getattr(task.train, "sources", task.train), "limit", 0))


def units_of(task: Task, groups: str | None) -> Ints:
    """Return the unit of each row as a number: the value of a column, or the row itself.

    Raises:
        DataError: If the column does not exist, or has no value in a row.
    """
    if groups is None:
        return np.arange(_row_count(task.train) + _row_count(task.test))
    values: list[str] = []
    for columns in (task.columns, task.test_columns):
        if groups not in columns:
            known = closest_match(groups, columns) if columns else "it has no columns"
            raise DataError(f"the data has no column '{groups}'; {known}")
        values += [str(value).strip() for value in columns[groups]]
    if blank := values.count(""):
        raise DataError(f"{blank:,} of {len(values):,} rows have no value in column '{groups}'; fill them in")
    return np.unique(np.array(values), return_inverse=True)[1].astype(np.int64)


def _token_lengths(table: Any) -> torch.Tensor | None:
    """Return the number of tokens of each text, with special ones, (row,); None if the inputs are not texts."""
    table = getattr(table, "sources", table)
    lengths, documents = text_lengths(table, torch.arange(len(table))), _documents(table)
    if lengths is None or documents is None:
        return lengths
    return torch.zeros(_row_count(table), dtype=torch.long).index_add_(0, documents, lengths.long())


def _classes_of(table: Any, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs of row and class that occur, each once."""
    targets = table.targets
    if getattr(table, "each_token", False):
        row, place = torch.arange(len(table)).repeat_interleave(table.offsets.diff()), targets.long()
        real = (targets >= 0) & (targets < classes)
        row, place = row[real], place[real]
    elif targets.is_floating_point():
        row, place = targets.nonzero(as_tuple=True)
    elif targets.ndim > 1:
        held = torch.stack([(targets == number).flatten(1).any(1) for number in range(classes)], 1)
        row, place = held.nonzero(as_tuple=True)
    else:
        row, place = torch.arange(len(targets)), targets.long()
    documents = _documents(table)
    codes = ((row if documents is None else documents[row]) * classes + place).unique()
    return codes // classes, codes % classes


def _documents(table: Any) -> torch.Tensor | None:
    """Return the text that each row is a window of; None if rows are whole texts."""
    documents: torch.Tensor | None = getattr(table, "documents", None)
    return documents


def _row_count(table: Any) -> int:
    """Return the number of rows; texts that are cut into windows count once."""
    documents = _documents(table)
    return len(table) if documents is None else int(documents[-1]) + 1 if len(documents) else 0
