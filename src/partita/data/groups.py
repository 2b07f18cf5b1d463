"""Groups of rows, such as all rows of a patient, by a column of the data."""

from __future__ import annotations

import numpy as np
import torch

from partita.core.group_units import number_groups
from partita.core.options import closest_match
from partita.data.errors import DataError
from partita.data.loading import refuse_missing
from partita.data.partition import Ints
from partita.data.task import Federation, Task


def row_groups(task: Task, column: str) -> Ints:
    """Number the groups of the train rows, (row,).

    Args:
        task: The task.
        column: The column with the name of each row's group.

    Raises:
        DataError: If there is no such column, or if rows have no value in it.
    """
    if column not in task.columns:
        hint = (
            closest_match(column, task.columns)
            if task.columns
            else "the data has no columns, so give a table with one, or use privacy.unit = 'example' or 'client'"
        )
        raise DataError(f"privacy.group is '{column}', but the train rows of {task.name} have no such column; {hint}")
    values = task.columns[column]
    refuse_missing(values, column, f"train rows of {task.name}")
    return number_groups(values)


def check_test_groups(task: Task, column: str) -> None:
    """Raise a DataError if rows of one group are in the train part and in the central test set."""
    if column not in task.test_columns:
        return
    both = {str(value) for value in task.columns[column]} & {str(value) for value in task.test_columns[column]}
    if both:
        raise DataError(
            f"{len(both):,} values of column '{column}' of {task.name} are in the train rows and in the central test "
            "set; keep all rows of a value in one part, or leave the test part out to have whole groups held out"
        )


def by_example(task: Task, groups: Ints) -> torch.Tensor:
    """Return the group of each train example, (example,), from those of the rows: a row may be cut into windows."""
    documents: torch.Tensor | None = getattr(task.train, "documents", None)
    numbers = torch.from_numpy(groups)
    return numbers if documents is None else numbers[documents]


def groups_at_several_clients(federation: Federation) -> tuple[int, int]:
    """Return the number of groups with train examples at more than one client, and the number of all groups."""
    assert federation.groups is not None
    owners = np.zeros(int(federation.groups.max()) + 1 if len(federation.groups) else 0, np.int64)
    for client in federation.clients:
        groups = federation[client].train.groups  # type: ignore[attr-defined]
        owners[np.unique(groups.numpy())] += 1
    return int((owners > 1).sum()), int((owners > 0).sum())
