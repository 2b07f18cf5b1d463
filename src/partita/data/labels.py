"""Classes and targets from a label column: class labels, texts, integers, or lists of them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from partita.core.options import closest_match, format_value
from partita.data.errors import DataError
from partita.data.loading import Dataset, DatasetPart


def is_list(part: DatasetPart, column: str) -> bool:
    """Return whether the column holds lists."""
    return hasattr(part.data.features[column], "feature")


def one_label(source: Dataset, column: str) -> tuple[tuple[str, ...], torch.Tensor, torch.Tensor]:
    """Return the class names, and the class index of each train row and each test row, (row,).

    Args:
        source: The dataset.
        column: The label column.
    """
    classes, train, test = label_lists(source, column)
    check_classes(source, column, classes, train)
    return classes, torch.tensor([code for [code] in train]), torch.tensor([code for [code] in test])


def many_labels(source: Dataset, column: str) -> tuple[tuple[str, ...], torch.Tensor, torch.Tensor]:
    """Return the class names, and multi-hot targets for train and for test, (row, class).

    Args:
        source: The dataset.
        column: The column of lists of labels.
    """
    classes, train, test = label_lists(source, column)
    check_classes(source, column, classes, train)
    return classes, _multi_hot(train, len(classes)), _multi_hot(test, len(classes))


def _multi_hot(rows: list[list[int]], classes: int) -> torch.Tensor:
    multi_hot = torch.zeros(len(rows), classes)
    for row, codes in enumerate(rows):
        multi_hot[row, codes] = 1.0
    return multi_hot


def label_lists(source: Dataset, column: str) -> tuple[tuple[str, ...], list[list[int]], list[list[int]]]:
    """Read a label column.

    Args:
        source: The dataset.
        column: The label column. Its values are labels or lists of labels.

    Returns:
        The class names, and the class indices of each train row and of each test row. If the column does not name its
        classes, they are the sorted distinct labels of the train rows (of all rows if the test part was split off).

    Raises:
        DataError: If a label is missing, train and test name different classes, or a test label is not in train.
    """
    for part in (source.train, source.test):
        part.need(column)
    named = _names(source.train, column)
    if named != _names(source.test, column):
        raise DataError(f"train and test of '{source.name}' name different classes in '{column}'; use the same names")
    train, test = (_rows(part, column) for part in (source.train, source.test))
    if named is not None:
        return tuple(named), train, test
    distinct = sorted({value for row in (*train, *(test if source.cut else ())) for value in row})
    classes, index_of = tuple(map(str, distinct)), {value: index for index, value in enumerate(distinct)}
    for number, row in enumerate(test):
        for value in row:
            if value not in index_of:
                raise DataError(
                    f"{source.test.row(number)} has the label {format_value(value)} in '{column}', which no train "
                    f"row has; {closest_match(str(value), classes)}"
                )
    train, test = ([[index_of[value] for value in row] for row in rows] for rows in (train, test))
    return classes, train, test


def check_classes(source: Dataset, column: str, classes: Sequence[str], rows: Sequence[Sequence[int]]) -> None:
    """Check that there is something to learn: any model scores 100% if all train rows have the same label.

    Args:
        source: The dataset.
        column: The label column.
        classes: The names of the classes.
        rows: The class indices of each train row.

    Raises:
        DataError: If there is no other class. If there is one, but no train row has it, this is a warning.
    """
    used = {frozenset(row) for row in rows}
    if not used:  # nothing is trained
        return
    [first, *others] = used
    if others or len(first) != 1:
        return
    what = f"rows of '{source.path}' have the label {format_value(classes[min(first)])} in '{column}'"
    if len(classes) == 1:
        raise DataError(
            f"all {what}, so any model would score 100%; add rows of another class, or name another label column"
        )
    warnings.warn(f"all train {what}, so a model learns to predict only that; check the data", stacklevel=3)


def _names(part: DatasetPart, column: str) -> list[str] | None:
    feature = part.data.features[column]
    feature = getattr(feature, "feature", feature)
    if hasattr(feature, "names"):
        return list(feature.names)
    kind = getattr(feature, "dtype", "lists")
    if not kind.startswith(("string", "large_string", "int", "uint", "bool")):
        raise DataError(
            f"column '{column}' of {part.where} holds {kind}, but labels are classes, texts or integers; "
            "name the label column"
        )
    return None


def _rows(part: DatasetPart, column: str) -> list[list[Any]]:
    rows = part.values(column)
    if not is_list(part, column):
        rows = [[value] for value in rows]
    names = _names(part, column)
    for index, row in enumerate(rows):
        # In a ClassLabel column, a negative number means no label.
        if row is None or any(value is None or value == "" or (names is not None and value < 0) for value in row):
            raise DataError(f"{part.row(index)} has no label in '{column}'; remove unlabeled rows")
        if names is not None and row and max(row) >= len(names):
            raise DataError(
                f"{part.row(index)} has the label {max(row)} in '{column}', but the column has only {len(names)} "
                "classes, from 0 up; correct the row, or the names of the classes"
            )
    return rows
