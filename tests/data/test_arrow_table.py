"""A table that is read without `datasets` shows what `datasets` shows of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.data import arrow_table
from partita.data.arrow_table import ArrowTable, is_plain
from partita.data.loading import open_parts


@pytest.fixture
def table() -> ArrowTable:
    import pyarrow

    rows = [{"role": "user", "content": "hi"}]
    columns: dict[str, Any] = {
        "text": [f"note {number}" for number in range(7)],
        "count": [*range(6), None],
        "share": [0.5 * number for number in range(7)],
        "known": [True, False, None, True, False, True, False],
        "words": [["a"], ["b", "c"], [], ["d"], ["e"], ["f"], ["g"]],
        "turns": [rows] * 7,
    }
    return ArrowTable(pyarrow.table(columns))


def seen(table: Any) -> list[Any]:
    """All that partita reads of a table."""
    names = table.column_names
    return [
        len(table),
        names,
        [table[name][:] for name in names],
        table[1:3],
        table[-2:],
        table[2],
        list(table),
        table.select_columns(["text", "count"])[0:2],
        {name: getattr(kind, "dtype", None) for name, kind in table.features.items()},
        {name: str(getattr(kind, "feature", "")).replace("dtype=", "") for name, kind in table.features.items()},
    ]


def test_a_table_is_that_of_datasets(table: ArrowTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_table, "ROWS_TOGETHER", 2)
    assert seen(table) == seen(table.to_dataset())


def test_chosen_rows_are_those_of_datasets(table: ArrowTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_table, "ROWS_TOGETHER", 2)
    order = np.array([5, 0, 3, 3, 6])
    chosen = table.select(order)
    assert seen(chosen) == seen(chosen.to_dataset()) == seen(table.to_dataset().select(order))
    again = chosen.select(np.array([4, 1]))
    assert again["text"] == ["note 6", "note 0"]


def test_a_table_with_classes_is_read_by_datasets(tmp_path: Path) -> None:
    import datasets
    import pyarrow.parquet

    classes = datasets.Features(label=datasets.ClassLabel(names=["no", "yes"]))
    datasets.Dataset.from_dict({"label": [0, 1]}, features=classes).to_parquet(str(tmp_path / "classes.parquet"))
    assert not is_plain(pyarrow.parquet.read_table(tmp_path / "classes.parquet"))
    assert open_parts(tmp_path / "classes.parquet")["train"].data.features["label"].names == ["no", "yes"]
    pyarrow.parquet.write_table(pyarrow.table({"label": [0, 1]}), tmp_path / "plain.parquet")
    assert isinstance(open_parts(tmp_path / "plain.parquet")["train"].data, ArrowTable)
