"""Adapter for the partitioners of flwr-datasets."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from partita.core.options import Count, closest_match
from partita.core.rng import Key
from partita.data.client_ids import NumberedClients
from partita.data.errors import DataError, first_line, need
from partita.data.partition import Partition, group_by_client
from partita.data.task import Task

ROW_COLUMN = "__row__"  # no task column has this name


def flwr(
    task: Task,
    key: Key,
    partitioner: Annotated[str, "partitioner class of flwr-datasets"],
    clients: Annotated[Count | None, "number of clients, if the class takes one"] = None,
    options: Annotated[Mapping[str, Any] | None, "other arguments of the class"] = None,
) -> Partition:
    """Any row partitioner of flwr-datasets, by class name. Rows that it does not assign are dropped.

    The number of clients and the seed are passed if the class takes them. Labels are in the column "label".

    Raises:
        DataError: If there is no such partitioner, or if it fails.
    """
    module, datasets = need("flwr_datasets.partitioner", "flwr-datasets"), need("datasets", "flwr-datasets")
    kinds = [name for name in module.__all__ if not name.startswith("Vertical") and name != "Partitioner"]
    if partitioner not in kinds:
        raise DataError(f"flwr-datasets has no row partitioner '{partitioner}'; {closest_match(partitioner, kinds)}")
    kind = getattr(module, partitioner)
    columns = {**task.columns, "label": task.labels(), ROW_COLUMN: np.arange(task.row_count)}
    arguments = _arguments(kind, clients, key, columns, dict(options or {}))
    try:
        return _assign_rows(task, kind(**arguments), datasets.Dataset.from_dict(columns))
    except DataError:
        raise
    except Exception as error:  # each partitioner raises its own exception types
        raise DataError(f"{partitioner} failed: {first_line(error)}; change split.clients or options") from error


def _assign_rows(task: Task, instance: Any, dataset: Any) -> Partition:
    instance.dataset = dataset
    if (count := instance.num_partitions) > task.row_count:
        raise DataError(f"{count} clients are more than the {task.row_count} examples; use fewer clients")
    owner = np.full(task.row_count, -1, np.int64)
    for position in range(count):
        rows = np.array(instance.load_partition(position)[ROW_COLUMN][:], np.int64)
        if (owner[rows] >= 0).any():
            raise DataError(
                f"{type(instance).__name__} assigns a row to two clients; use one that assigns each row once"
            )
        owner[rows] = position
    return group_by_client(owner, NumberedClients(count))


def _arguments(
    kind: type, clients: int | None, key: Key, columns: Mapping[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    takes = inspect.signature(kind).parameters
    if clients is not None and "num_partitions" not in takes:
        raise DataError(f"{kind.__name__} chooses the number of clients itself; remove clients = {clients}")
    offered = {"num_partitions": clients, "partition_by": "label", "seed": key.seed() % 2**32}
    passed = {name: value for name, value in offered.items() if name in takes and value is not None} | options
    for name in passed:
        if name not in takes:
            raise DataError(f"{kind.__name__} has no option '{name}'; {closest_match(name, takes)}")
    for name, parameter in takes.items():
        if name not in passed and parameter.default is parameter.empty:
            remedy = "clients" if name == "num_partitions" else f"options.{name}"
            raise DataError(f"{kind.__name__} needs '{name}'; set split.{remedy}")
    if passed.get("partition_by", ROW_COLUMN) not in columns:
        column, known = passed["partition_by"], [name for name in columns if name != ROW_COLUMN]
        raise DataError(f"there is no column '{column}' to partition by; {closest_match(column, known)}")
    return passed
