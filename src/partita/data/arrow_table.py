"""A table of plain values with the interface of `datasets`, whose import takes longer than reading most files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.data.errors import need

ROWS_TOGETHER = 10_000  # rows that are taken at a time: a single string array holds at most 2 GB
NAMES = {"double": "float64", "float": "float32", "halffloat": "float16"}  # of types, as `datasets` has them


@dataclass(frozen=True)
class Value:
    """The type of a column of single values."""

    dtype: str


@dataclass(frozen=True)
class List:
    """The type of a column of lists: that of their elements."""

    feature: Any


@dataclass(frozen=True, eq=False)
class ArrowTable:
    """The part of the interface of `datasets.Dataset` that partita uses.

    Attributes:
        table: The pyarrow.Table.
        rows: The chosen rows; None for all.
    """

    table: Any
    rows: NDArray[np.int64] | None = None

    @property
    def column_names(self) -> list[str]:
        return list(self.table.column_names)

    @cached_property
    def features(self) -> dict[str, Any]:
        return {field.name: _feature(field.type) for field in self.table.schema}

    def __len__(self) -> int:
        return int(self.table.num_rows) if self.rows is None else len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self), ROWS_TOGETHER):
            yield from self._part(start, start + ROWS_TOGETHER).to_pylist()

    def __getitem__(self, key: str | int | slice) -> Any:
        """Return a column as a list, a row as a dict, or consecutive rows as a dict of lists."""
        if isinstance(key, str):
            only = self.select_columns([key])
            parts = (only._part(start, start + ROWS_TOGETHER) for start in range(0, len(self), ROWS_TOGETHER))
            return [value for part in parts for value in part.column(0).to_pylist()]
        if isinstance(key, int):
            return self._part(key, key + 1).to_pylist()[0]
        start, stop, _ = key.indices(len(self))
        return self._part(start, stop).to_pydict()

    def select(self, rows: NDArray[np.int64]) -> ArrowTable:
        """Return the table with only these rows."""
        return ArrowTable(self.table, np.asarray(rows) if self.rows is None else self.rows[rows])

    def select_columns(self, names: Sequence[str]) -> ArrowTable:
        """Return the table with only these columns."""
        return ArrowTable(self.table.select(list(names)), self.rows)

    def to_dataset(self) -> Any:
        """Return the same as a datasets.Dataset."""
        dataset = need("datasets", "data").Dataset(self.table)
        return dataset if self.rows is None else dataset.select(self.rows)

    def _part(self, start: int, stop: int) -> Any:
        if self.rows is None:
            return self.table.slice(start, stop - start)
        rows, pyarrow = np.ascontiguousarray(self.rows[start:stop], np.int64), need("pyarrow", "data")
        # Not from the array itself, for which pyarrow imports pandas.
        return self.table.take(pyarrow.Array.from_buffers(pyarrow.int64(), len(rows), [None, pyarrow.py_buffer(rows)]))


def plain(table: Any) -> ArrowTable:
    """Return a pyarrow.Table as an ArrowTable.

    Raises:
        UnicodeDecodeError: If the name of a column is no text.
    """
    found = ArrowTable(table)
    _ = found.features
    return found


def is_plain(table: Any) -> bool:
    """Whether a pyarrow.Table has no classes or images of `datasets`, which are in its metadata."""
    return b"huggingface" not in (table.schema.metadata or {})


def _feature(kind: Any) -> Any:
    types = need("pyarrow.types", "data")
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return List(_feature(kind.value_type))
    if types.is_struct(kind):
        return {field.name: _feature(field.type) for field in kind}
    return Value(NAMES.get(str(kind), str(kind)))
