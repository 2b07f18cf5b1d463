"""Tables of counts of a site's data. Their cells are known without looking at the data, except for class names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partita.core.options import closest_match
from partita.data import DataError, Federation, Task
from partita.data.choice_examples import ChoiceExamples
from partita.data.image_shapes import image_shapes
from partita.data.loading import open_parts
from partita.data.ragged import RaggedExamples
from partita.data.segmentation import mask_folders
from partita.data.seq2seq_examples import Seq2SeqExamples

Ints = NDArray[np.int64]
MODES = ("1", "L", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F")
OTHER_MODE = "other"
SIDES = tuple(2**power for power in range(4, 15))  # upper ends of the bins of image sides, in pixels
GROUP_SIZES = tuple(2**power - 1 for power in range(1, 11))  # upper ends of the bins of rows of a group
QUANTILES = (10, 50, 90)  # in percent
LARGEST = "largest"
OR_MORE = " or more"  # end of the name of the last bin
CLASSES, TOKENS, SIDE, MODE, GROUPS = "classes", "tokens", "longer side in pixels", "image mode", "rows of a group"


@dataclass(frozen=True, eq=False)
class CountTable:
    """Which rows are in which cells.

    Attributes:
        name: Name of the table.
        cells: Names of the cells.
        rows: A row for each entry, (entry,). A row with several classes has several entries.
        places: The cell of each entry, (entry,).
        units: The unit that a row belongs to, such as a patient; the row itself without groups, (row,).
        per_row: Largest number of cells that one row can change.
    """

    name: str
    cells: tuple[str, ...]
    rows: Ints
    places: Ints
    units: Ints
    per_row: int = 1

    def counts(self) -> list[int]:
        """Return the number of rows in each cell."""
        return [int(count) for count in np.bincount(self.places, minlength=len(self.cells))]

    def unit_counts(self) -> list[int]:
        """Return the number of distinct units in each cell."""
        pairs = np.unique(np.stack([self.places, self.units[self.rows]]), axis=1)
        return [int(count) for count in np.bincount(pairs[0], minlength=len(self.cells))]

    def unit_count(self) -> int:
        """Return the number of distinct units."""
        return len(np.unique(self.units))


def tables_of(federation: Federation, options: Mapping[str, Any], groups: str | None = None) -> list[CountTable]:
    """Return the tables of all rows on this machine: those that clients share, and those that are held out.

    Which rows are held out depends on the number of rows, so counts of one part could change a lot with one row more.

    Args:
        federation: The data.
        options: The table `[data]` of the experiment.
        groups: The column with the unit of each row, such as a patient; None if each row is a unit.

    Raises:
        DataError: If the column does not exist.
    """
    task = federation.task
    units = _units(task, groups)
    found = [table for table in (class_table(task, units), token_table(task, units)) if table is not None]
    if "image" in options and "path" in options:
        found += _image_tables(options, groups)
    if groups is not None:
        sizes = np.unique(units, return_counts=True)[1]
        found.append(_binned(GROUPS, sizes, GROUP_SIZES, np.arange(len(sizes))))
    return found


def typical_cells(cells: Mapping[str, int | None], least: int = 0) -> dict[str, str]:
    """Return the cells that hold quantiles of a table whose cells are in order, and of any table the largest cell.

    Args:
        cells: The counts, None where unknown.
        least: A quantile is left out if fewer than this many are beyond it, and the largest cell if it is smaller.
    """
    counts, names = np.array([count or 0 for count in cells.values()]), list(cells)
    total = int(counts.sum())
    found = {}
    for share in QUANTILES if names[-1].endswith(OR_MORE) else ():
        if total and total * min(share, 100 - share) >= 100 * least:
            found[f"{share}%"] = names[int(np.searchsorted(counts.cumsum() * 100, total * share))]
    if total and counts.max() >= least:
        found[LARGEST] = names[int(counts.argmax())]
    return found


def part_sizes(federation: Federation, client: str) -> dict[str, int]:
    """Return the number of rows in each part of the site's data. Texts that are cut into windows count once."""
    task = federation.task
    parts = federation.parts[federation.clients.index(client)]
    documents: torch.Tensor | None = getattr(task.train, "documents", None)
    sizes = [len(part) if documents is None else len(documents[part].unique()) for part in parts]
    return dict(zip(("train", "validation", "test", "held out"), (*sizes, _row_count(task.test)), strict=True))


def class_table(task: Task, units: Ints) -> CountTable | None:
    """Return how many rows have each class; None if the task has no classes."""
    if task.kind.outputs != "classes" or not task.classes:
        return None
    rows, places, start = [], [], 0
    for table in (task.train, task.test):
        row, place = _classes_of(table, task)
        rows.append(row + start)
        places.append(place)
        start += _row_count(table)
    per_row = 1 if task.kind.one_class else len(task.classes)
    return CountTable(CLASSES, task.classes, np.concatenate(rows), np.concatenate(places), units, per_row)


def token_table(task: Task, units: Ints) -> CountTable | None:
    """Return how many texts have how many tokens without special ones; None if the inputs are not texts.

    The last cell holds texts that reach the limit, at which they are cut.
    """
    train, test = token_lengths(task.train), token_lengths(task.test)
    if train is None or test is None:
        return None
    limit, special = token_limit(task.train), _special_tokens(task)
    ends = [0]
    while (end := max(16, 2 * ends[-1])) < limit - special:
        ends.append(end)
    ends += [limit - special - 1] if ends[-1] < limit - special - 1 else []
    counted = np.maximum(np.concatenate([train, test]) - special, 0)
    return _binned(TOKENS, counted, ends, units)


def token_lengths(table: Any) -> Ints | None:
    """Return the number of tokens of each text, with special ones, (row,); None if the inputs are not texts."""
    if isinstance(table, Seq2SeqExamples):
        table = table.sources
    if not isinstance(table, RaggedExamples | ChoiceExamples):
        return None
    lengths = table.lengths(torch.arange(len(table)))
    documents: torch.Tensor | None = getattr(table, "documents", None)
    if documents is not None:
        lengths = torch.zeros(_row_count(table), dtype=torch.long).index_add_(0, documents, lengths.long())
    return lengths.numpy().astype(np.int64)


def token_limit(table: Any) -> int:
    """Return the maximum number of tokens of a row."""
    return int((table.sources if isinstance(table, Seq2SeqExamples) else table).limit)


def _special_tokens(task: Task) -> int:
    count = getattr(task.tokenizer, "num_special_tokens_to_add", None)
    return int(count()) if count else 0


def _classes_of(table: Any, task: Task) -> tuple[Ints, Ints]:
    """Return the pairs of row and class that occur, each once."""
    targets, classes = table.targets, len(task.classes)
    if isinstance(table, RaggedExamples) and table.each_token:
        row = torch.arange(len(table)).repeat_interleave(table.offsets.diff())
        real = (targets >= 0) & (targets < classes)
        codes = (row[real] * classes + targets[real].long()).unique()
        row, place = codes // classes, codes % classes
    elif targets.is_floating_point():
        row, place = targets.nonzero(as_tuple=True)
    elif targets.ndim > 1:
        held = torch.stack([(targets == number).flatten(1).any(1) for number in range(classes)], 1)
        row, place = held.nonzero(as_tuple=True)
    else:
        row, place = torch.arange(len(targets)), targets.long()
    documents: torch.Tensor | None = getattr(table, "documents", None)
    if documents is not None:
        codes = (documents[row] * classes + place).unique()
        row, place = codes // classes, codes % classes
    return row.numpy().astype(np.int64), place.numpy().astype(np.int64)


def _image_tables(options: Mapping[str, Any], groups: str | None) -> list[CountTable]:
    """Return the tables of sizes and modes of the image files."""
    parts = open_parts(options["path"], options.get("config"), mask_folders(Path(options["path"])))
    named = options.get("test")
    used = {"train", named if isinstance(named, str) else "test"}
    sides, modes, units = [], list[str](), []
    for name, part in parts.items():
        if name in used:
            side, mode = image_shapes(part, options["image"])
            sides.append(side)
            modes += mode
            units += (
                [f"{name}:{row}" for row in range(len(side))] if groups is None else _column(part.columns(), groups)
            )
    codes = np.unique(np.array(units), return_inverse=True)[1].astype(np.int64)
    cells = (*MODES, OTHER_MODE)
    places = np.array([cells.index(mode) if mode in MODES else len(MODES) for mode in modes], np.int64)
    mode_table = CountTable(MODE, cells, np.arange(len(places)), places, codes)
    return [_binned(SIDE, np.concatenate(sides), SIDES, codes), mode_table]


def _binned(name: str, values: Ints, ends: Sequence[int], units: Ints) -> CountTable:
    """Count values in bins. A bin ends with each of `ends`, and a last one has no end."""
    starts = [0, *(end + 1 for end in ends)]
    cells = [str(low) if low == high else f"{low} to {high}" for low, high in zip(starts, ends, strict=False)]
    places = np.searchsorted(np.array(ends), values).astype(np.int64)
    return CountTable(name, (*cells, f"{starts[-1]}{OR_MORE}"), np.arange(len(values)), places, units)


def _units(task: Task, groups: str | None) -> Ints:
    if groups is None:
        return np.arange(_row_count(task.train) + _row_count(task.test))
    values = [*_column(task.columns, groups), *_column(task.test_columns, groups)]
    return np.unique(np.array(values), return_inverse=True)[1].astype(np.int64)


def _column(columns: Mapping[str, NDArray[Any]], name: str) -> list[str]:
    if name not in columns:
        known = closest_match(name, columns) if columns else "it has no columns"
        raise DataError(f"the data has no column '{name}'; {known}")
    values = [str(value) for value in columns[name]]
    if blank := sum(not value.strip() for value in values):
        raise DataError(f"{blank:,} of {len(values):,} rows have no value in column '{name}'; fill them in")
    return values


def _row_count(table: Any) -> int:
    """Return the number of rows; texts that are cut into windows count once."""
    documents: torch.Tensor | None = getattr(table, "documents", None)
    return len(table) if documents is None else int(documents[-1]) + 1 if len(documents) else 0
