"""Load datasets from files, image folders, folders written by `save_to_disk`, and the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import chain
from math import floor
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from partita.core.given import is_given
from partita.core.group_units import number_groups
from partita.core.options import Count, Range, closest_match
from partita.core.rng import Key
from partita.data.dataset_files import ROWS_TOGETHER, Opener, find_parts
from partita.data.errors import DataError, reading

# The column whose equal values stay together if a test part is held out. Set by `hold_out_groups`, because every reader
# of files holds out in the same way and none of them has a reason to know.
_HELD_TOGETHER: ContextVar[str | None] = ContextVar("held_together", default=None)

Targets = TypeVar("Targets", "torch.Tensor", "list[Any]")  # targets of the rows of a part
# Options that all readers of files share.
DataPath = Annotated[str | Path, "file, folder, or Hugging Face Hub id"]
HubConfig = Annotated[str | None, "configuration of a Hub dataset"]
TestPart = Annotated[
    Annotated[float, Range(above=0, below=1)] | str,
    "name of the test part, or share of the rows to hold out if there is no test part",
]
Limit = Annotated[
    Count | None,
    "for tries: use at most this many train rows and as many test rows, drawn before the split by the seed",
]


HANDED_OVER = "the data handed over"  # what messages call it


class Columns(Mapping[str, NDArray[Any]]):
    """Columns that are read on first use. Most are never used, and a column of long texts would take much memory.

    Args:
        rows: Length of each column.
        readers: A function that reads the column, by name.
    """

    def __init__(self, rows: int, readers: Mapping[str, Callable[[], NDArray[Any]]]) -> None:
        self.rows, self.readers, self.read = rows, readers, dict[str, NDArray[Any]]()

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self.read:
            self.read[name] = self.readers[name]()
        return self.read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.readers)

    def __len__(self) -> int:
        return len(self.readers)


@dataclass(frozen=True, eq=False)
class DatasetPart:
    """The train or test part of a dataset, with its name and row numbers for error messages."""

    data: Any  # datasets.Dataset, or an ArrowTable
    where: str  # name of the part in error messages
    rows: NDArray[np.int64] = field(repr=False)  # row numbers in the source, from 0

    def row(self, place: int) -> str:
        """Name row `place` in an error message."""
        return f"row {self.rows[place]} of {self.where}"

    def need(self, *columns: str) -> None:
        """Raise a DataError if a column is missing."""
        for column in columns:
            if column not in self.data.column_names:
                raise DataError(
                    f"{self.where} has no column '{column}'; {closest_match(column, self.data.column_names)}"
                )

    def select(self, rows: NDArray[np.int64]) -> DatasetPart:
        """Return the part with only these rows."""
        return replace(self, data=self.data.select(rows), rows=self.rows[rows])

    def values(self, column: str) -> list[Any]:
        """Return the values of a column."""
        with reading(f"column '{column}' of {self.where}"):
            values: list[Any] = self.data[column][:]
        return values

    def class_names(self, column: str, values: Sequence[int | None]) -> list[str | None]:
        """Return the class names of the numbers in a class column; None for a missing or negative one.

        Raises:
            DataError: If a number is beyond the last class, as in a damaged file.
        """
        names = self.data.features[column].names
        for index, value in enumerate(values):
            if value is not None and value >= len(names):
                raise DataError(
                    f"{self.row(index)} has the class {value} in '{column}', but the column has only {len(names)} "
                    "classes, from 0 up; correct the row, or the names of the classes"
                )
        return [None if value is None or value < 0 else names[value] for value in values]

    def texts(self, column: str) -> list[str]:
        """Return a text column, as `text_batches`."""
        return list(chain.from_iterable(self.text_batches(column)))

    def text_batches(self, column: str) -> Iterator[list[str]]:
        """Yield a text column some rows at a time, so that it need not fit into memory.

        Raises:
            DataError: If the column is missing or not text, or if a value is missing or blank.
        """
        self.need(column)
        if "string" not in getattr(self.data.features[column], "dtype", ""):
            raise DataError(f"column '{column}' of {self.where} holds no text; name a column that does")
        only = self.data.select_columns([column])
        for start in range(0, len(self.rows), ROWS_TOGETHER):
            with reading(f"column '{column}' of {self.where}"):
                texts: list[str] = only[start : start + ROWS_TOGETHER][column]
            for place, text in enumerate(texts, start):
                if text is None or not text.strip():
                    raise DataError(f"{self.row(place)} has no text in '{column}'; fill it in or remove the row")
            yield texts

    def columns(self, *others: str) -> Mapping[str, NDArray[Any]]:
        """Return the columns that splits can use: all of type text, integer or class, except `others`."""
        usable = (name for name in self.data.column_names if name not in others and self._can_split_by(name))
        return Columns(len(self.rows), {name: partial(self._column, name) for name in usable})

    def _can_split_by(self, name: str) -> bool:
        feature = self.data.features[name]
        kind = getattr(feature, "dtype", "")
        return type(feature).__name__ in ("Value", "ClassLabel") and ("string" in kind or "int" in kind)

    def _column(self, name: str) -> NDArray[Any]:
        feature, values = self.data.features[name], self.values(name)
        if hasattr(feature, "int2str"):
            values = self.class_names(name, values)
        return np.array(["" if value is None else str(value) for value in values])


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset with a train and a test part. The train part is empty if a model is only evaluated."""

    name: str
    path: str | Path
    train: DatasetPart
    test: DatasetPart
    cut: bool  # whether the test part was split off the train part


def load_dataset(
    path: str | Path | Dataset,
    key: Key,
    config: str | None = None,
    test: float | str = 0.2,
    parts: Mapping[str, Opener] | None = None,
) -> Dataset:
    """Load the train and test parts of a dataset.

    Args:
        path: File, folder, or Hub id. A dataset that is opened already is returned as it is.
        key: Key for the random train/test split.
        config: Configuration of a Hub dataset.
        test: Name of the part to test on. A number is the share of the rows to hold out if there is no part "test".
        parts: Opens each part, by name. Default: as the path says.

    Raises:
        DataError: If the dataset cannot be read or a part is missing.
    """
    if isinstance(path, Dataset):
        return path
    parts = find_parts(path, config) if parts is None else parts
    path = HANDED_OVER if is_given(path) else path
    place = Path(path).resolve()
    name = str(path) if not place.exists() else place.stem if place.is_file() else place.name
    if "train" not in parts:
        raise DataError(f"'{path}' has no part 'train', only: {', '.join(parts)}; rename one of them")
    train = _open_part(parts, "train", path)
    if isinstance(test, str) and test not in parts:
        raise DataError(f"'{path}' has no part '{test}' to test on; {closest_match(test, parts)}")
    if isinstance(test, str) or "test" in parts:
        return Dataset(name, path, train, _open_part(parts, test if isinstance(test, str) else "test", path), cut=False)
    return Dataset(name, path, *_hold_out(train, test, key), cut=True)


@contextmanager
def hold_out_groups(column: str | None) -> Iterator[None]:
    """Within this context, rows with the same value of a column are held out for the test part together, or not at all.

    Args:
        column: The column; None to hold out single rows.
    """
    before = _HELD_TOGETHER.set(column)
    try:
        yield
    finally:
        _HELD_TOGETHER.reset(before)


def refuse_missing(values: Iterable[Any], column: str, rows: str) -> None:
    """Raise a DataError if rows have no value in a column that names their group.

    Args:
        values: The values of the column; a missing one is empty.
        column: The column.
        rows: What the rows are, in the message.
    """
    named = [bool(str(value).strip()) for value in values]
    if missing := named.count(False):
        raise DataError(
            f"{missing:,} of {len(named):,} {rows} have no value in column '{column}', which names the group of a row; "
            "fill them in, or remove the rows"
        )


def open_parts(
    path: str | Path, config: str | None = None, parts: Mapping[str, Opener] | None = None
) -> dict[str, DatasetPart]:
    """Open all parts of a dataset, by name.

    Args:
        path: File, folder, or Hub id.
        config: Configuration of a Hub dataset.
        parts: Opens each part, by name. Default: as the path says.

    Raises:
        DataError: If the dataset cannot be read.
    """
    parts = find_parts(path, config) if parts is None else parts
    return {name: _open_part(parts, name, path) for name in parts}


def limit_rows(
    source: Dataset, limit: int | None, key: Key, targets: Iterable[Targets] = ()
) -> tuple[Dataset, list[Targets]]:
    """Draw at most `limit` rows of the train part and of the test part, all clients together.

    Args:
        source: The dataset.
        limit: Maximum number of rows of a part; None keeps all.
        key: Key for the draw.
        targets: Targets of the train rows and of the test rows, if rows have some. If they are one class per row, each
            class keeps its share of the rows; otherwise rows are drawn at random.

    Returns:
        `(dataset, targets)` with the drawn rows, in their order.
    """
    given = list(targets)
    if limit is None:
        return source, given
    parts = {"train": source.train, "test": source.test}
    kept: list[Targets] = []
    for place, (name, part) in enumerate(parts.items()):
        values = given[place] if given else None
        rows = _draw(len(part.rows), limit, key / "limit" / name, values)
        parts[name] = part.select(rows)
        if values is not None:
            kept.append(_pick(values, rows))
    return replace(source, train=parts["train"], test=parts["test"]), kept


def _pick(values: Any, rows: NDArray[np.int64]) -> Any:
    return values[rows] if isinstance(values, torch.Tensor) else [values[row] for row in rows]


def _draw(count: int, limit: int, key: Key, targets: Any) -> NDArray[np.int64]:
    """Draw row indices. A row's rank within its class, as a fraction, says when it is drawn."""
    order = key.permutation(count)  # (row,)
    one_class = isinstance(targets, torch.Tensor) and targets.ndim == 1 and not targets.is_floating_point()
    classes = targets[order] if one_class else torch.zeros(count)
    ranks = torch.empty(count)
    for value in classes.unique():
        of_class = (classes == value).nonzero().flatten()
        ranks[of_class] = (torch.arange(len(of_class)) + 0.5) / len(of_class)
    drawn = order[ranks.argsort(stable=True)[:limit]]
    return np.sort(drawn.numpy())


def _open_part(parts: Mapping[str, Opener], name: str, path: str | Path) -> DatasetPart:
    where = f"the {name} part of '{HANDED_OVER if is_given(path) else path}'"
    with reading(where):
        data = parts[name]()
    if not len(data):
        raise DataError(f"{where} is empty; add rows")
    return DatasetPart(data, where, np.arange(len(data)))


def _hold_out(part: DatasetPart, share: float, key: Key) -> tuple[DatasetPart, DatasetPart]:
    column = _HELD_TOGETHER.get()
    grouped = column is not None and column in part.data.column_names
    groups = np.arange(len(part.rows))
    if grouped:
        values = ["" if value is None else str(value) for value in part.values(str(column))]
        refuse_missing(values, str(column), f"rows of {part.where}")
        groups = number_groups(np.array(values))
    total = int(groups.max()) + 1
    count = floor(total * Fraction(str(share)))
    if not 0 < count < total:
        what = f"different values of '{column}' in" if grouped else "rows of"
        raise DataError(
            f"there is no test part, and test = {share} would hold out {count} of the {total} {what} {part.where}; add "
            "a test part, or set a share between 0 and 1 that leaves rows in both parts"
        )
    drawn = np.isin(groups, (key / "test").permutation(total).numpy()[:count])
    return part.select(np.flatnonzero(~drawn)), part.select(np.flatnonzero(drawn))
