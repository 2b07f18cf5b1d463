"""Scores of subgroups of the central test set, such as the patients of each sex or site."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from partita.core.data import Examples
from partita.core.options import OptionError, closest_match
from partita.data import Subset, Task
from partita.record.metric import Metric
from partita.record.row import Subgroups

MAX_GROUPS = 50
SMALL = 30  # default of evaluate.subgroup_min
MISSING = "(missing)"  # the group of the rows without a value

Groups = Mapping[str, torch.Tensor]  # the test rows of each group, by the value of the column


def find_groups(task: Task, column: str | None) -> Groups:
    """Return the groups of test rows with the same value of a column; none without a column.

    Args:
        task: The task.
        column: The column of the test rows.

    Raises:
        OptionError: If there is no such column, or if it has one value or very many.
    """
    if column is None:
        return {}
    if column not in task.test_columns:
        known = task.test_columns
        hint = closest_match(column, known) if known else "leave evaluate.subgroups out"
        raise OptionError(f"evaluate.subgroups is '{column}', but the test rows have no such column; {hint}")
    values, codes = np.unique(task.test_columns[column], return_inverse=True)
    if not 1 < len(values) <= MAX_GROUPS:
        raise OptionError(
            f"evaluate.subgroups is '{column}', which has {len(values)} different values in the test rows; name a "
            f"column with 2 to {MAX_GROUPS}, such as ranges of a number"
        )
    return {
        str(value).strip() or MISSING: torch.from_numpy(np.flatnonzero(codes == place))
        for place, value in enumerate(values)
    }


def score_groups(
    groups: Groups, test: Any, metric: Metric, minimum: int, score: Callable[[Examples], Mapping[str, float]]
) -> Subgroups:
    """Score each group.

    Args:
        groups: The test rows of each group.
        test: The test examples.
        metric: The metric to record.
        minimum: A group of fewer examples does not count for the gap.
        score: Returns the scores on some examples.

    Returns:
        "groups": by group, its number of "examples", and its "value" if the metric is defined for it. "minimum": as
        given. "gap": the difference between the best and the worst group; left out if fewer than two groups count.
    """
    scored: dict[str, dict[str, float]] = {}
    for name, rows in groups.items():
        value = score(Subset(test, rows)).get(metric.name)
        scored[name] = {"examples": len(rows), **({} if value is None else {"value": value})}
    counted = [own["value"] for own in scored.values() if "value" in own and own["examples"] >= minimum]
    found: Subgroups = {"groups": scored, "minimum": minimum}
    if len(counted) > 1:
        found["gap"] = max(counted) - min(counted)
    return found
