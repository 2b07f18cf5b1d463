"""Classes and targets from a column of labels, whichever way they are written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from partita.core.options import closest_match, format_value
from partita.data.errors import DataError
from partita.data.loading import Dataset, DatasetPart


def is_list(part: DatasetPart, column: str) -> bool:
    return hasattr(part.data.features[column], "feature")


def one_label(source: Dataset, column: str) -> tuple[tuple[str, ...], Tensor, Tensor]:
    """Classes, and the class (row,) of each train and test row."""
    classes, train, test = label_lists(source, column)
    return classes, torch.tensor([code for [code] in train]), torch.tensor([code for [code] in test])


def many_labels(source: Dataset, column: str) -> tuple[tuple[str, ...], Tensor, Tensor]:
    """Classes, and zeros and ones (row, class) for train and test."""
    classes, train, test = label_lists(source, column)
    return classes, _multi_hot(train, len(classes)), _multi_hot(test, len(classes))


def _multi_hot(rows: list[list[int]], classes: int) -> Tensor:
    marked = torch.zeros(len(rows), classes)
    for row, codes in enumerate(rows):
        marked[row, codes] = 1.0
    return marked


def label_lists(source: Dataset, column: str) -> tuple[tuple[str, ...], list[list[int]], list[list[int]]]:
    """Classes as the column names them or, where it does not, as they are met; and those of each row."""
    for part in (source.train, source.test):
        part.need(column)
    named = _names(source.train, column)
    if named != _names(source.test, column):
        raise DataError(f"train and test of '{source.name}' name other classes in '{column}'; write them alike")
    train, test = (_rows(part, column) for part in (source.train, source.test))
    if named is not None:
        return tuple(named), train, test
    met = sorted({value for row in (*train, *(test if source.cut else ())) for value in row})
    classes, places = tuple(map(str, met)), {value: place for place, value in enumerate(met)}
    for number, row in enumerate(test):
        for value in row:
            if value not in places:
                raise DataError(
                    f"{source.test.row(number)} has the label {format_value(value)} in '{column}', which no train "
                    f"row has; {closest_match(str(value), classes)}"
                )
    train, test = ([[places[value] for value in row] for row in rows] for rows in (train, test))
    return classes, train, test


def _names(part: DatasetPart, column: str) -> list[str] | None:
    feature = part.data.features[column]
    feature = getattr(feature, "feature", feature)
    if hasattr(feature, "names"):
        return list(feature.names)
    kind = getattr(feature, "dtype", "lists")
    if not kind.startswith(("string", "large_string", "int", "uint", "bool")):
        raise DataError(
            f"column '{column}' of {part.where} holds {kind}, but labels are classes, texts or whole numbers; "
            "name the column that has them"
        )
    return None


def _rows(part: DatasetPart, column: str) -> list[list[Any]]:
    rows = part.values(column)
    if not is_list(part, column):
        rows = [[value] for value in rows]
    named = _names(part, column) is not None
    for place, row in enumerate(rows):
        # Where classes have names, a negative number stands for none.
        if row is None or any(value is None or value == "" or (named and value < 0) for value in row):
            raise DataError(f"{part.row(place)} has no label in '{column}'; leave unlabelled rows out")
    return rows
