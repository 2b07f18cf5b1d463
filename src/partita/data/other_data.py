"""Data to evaluate a trained model on. Its columns and label names must fit the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from partita.core.options import closest_match, format_value
from partita.core.registry import find_function, named, takes
from partita.core.rng import Key
from partita.data import INDEX
from partita.data.arrow_table import ArrowTable
from partita.data.errors import DataError, need
from partita.data.i2b2 import read_i2b2
from partita.data.labels import is_list
from partita.data.loading import Dataset, DatasetPart, open_parts
from partita.data.segmentation import mask_folders
from partita.data.standoff import read_brat, standoff_parts
from partita.data.task import Task
from partita.tasks import MULTI_LABEL_TEXT, TaskKind

Unknown = Literal["error", "drop"]
LABELS = {"images": "label", "text": "label", "tokens": "tags"}  # by reader, its option for the label column
DOCUMENTS = ("brat", "i2b2")
SHOWN = 5  # labels named in an error


@dataclass(frozen=True)
class OtherData:
    """Rows to evaluate on.

    Attributes:
        task: The task. Its train part is empty, and its test part holds the rows.
        part: Name of the part that was read.
        left_out: Rows that are not evaluated, by reason.
    """

    task: Task
    part: str
    left_out: Mapping[str, int]


def read_other(
    path: str,
    reading: Mapping[str, Any],
    kind: TaskKind,
    classes: Sequence[str],
    tokenizer: str | None = None,
    split: str | None = None,
    unknown: Unknown = "error",
) -> OtherData:
    """Read data for a trained model.

    Args:
        path: File, folder, or Hub id.
        reading: The keys of `[data]` that say how a row is read, with its "name".
        kind: The kind of task of the model.
        classes: The names of its outputs.
        tokenizer: Folder or Hub id of the model's tokenizer.
        split: The part to read. Default: "test" if there is one, or the only one.
        unknown: What to do with rows whose label is missing or not among the classes.

    Raises:
        DataError: If the data cannot be read or does not fit the model.
    """
    name, options = named(reading)
    if name not in INDEX or not takes("data", name, "path"):
        raise DataError(
            f"data of the task '{name}' cannot be read from other files, because it is built in or read by own code; "
            "leave --data out to evaluate on the run's own test set"
        )
    parts = _open(path, name, options)
    chosen = _choose(path, parts, split)
    part = parts[chosen]
    if name in DOCUMENTS:
        options = {key: value for key, value in options.items() if key in ("max_length", "long_texts", "overlap")}
        name = "tokens"
    left_out: Counter[str] = Counter()
    if name in LABELS:
        column = options.get(LABELS[name], LABELS[name])
        part = _with_classes(part, column, classes, kind, unknown, left_out)
    if name == "segmentation":
        options["classes"] = tuple(classes)  # masks hold numbers, in the order of the model's classes
    nothing = np.empty(0, np.int64)
    source = Dataset(Path(path).stem, path, part.select(nothing), part, cut=False)
    if takes("data", name, "tokenizer"):
        options["tokenizer"] = tokenizer
    task: Task = find_function("data", name)(path=source, key=Key(0), **options)
    rows = len(part.rows)
    if name == "chat" and len(task.test) < rows:
        left_out["longer than max_length tokens"] += rows - len(task.test)
    if task.kind.name != kind.name:
        raise DataError(
            f"'{path}' is data of kind '{task.kind.name}', but the model is for '{kind.name}'; give data of its kind"
        )
    return OtherData(replace(task, classes=tuple(classes)), chosen, dict(left_out))


def _open(path: str, name: str, options: Mapping[str, Any]) -> dict[str, DatasetPart]:
    if name == "brat":
        chosen = {key: options[key] for key in ("types", "rows", "discontinuous") if key in options}
        return standoff_parts(path, ".ann", lambda files: read_brat(files, **chosen))
    if name == "i2b2":
        types = {"types": options["types"]} if "types" in options else {}
        return standoff_parts(path, ".con", lambda files: read_i2b2(files, **types))
    folders: Any = None
    if name == "segmentation":
        folders = mask_folders(Path(path), options.get("image", "image"), options.get("mask", "mask"))
    return open_parts(path, None, folders)


def _choose(path: str, parts: Mapping[str, DatasetPart], split: str | None) -> str:
    if split is not None and split not in parts:
        raise DataError(f"'{path}' has no part '{split}'; {closest_match(split, parts)}")
    if split is not None or "test" in parts:
        return split or "test"
    if len(parts) > 1:
        raise DataError(f"'{path}' has the parts {', '.join(parts)}, but none called 'test'; choose one with --split")
    return next(iter(parts))


def _with_classes(
    part: DatasetPart, column: str, classes: Sequence[str], kind: TaskKind, unknown: Unknown, left_out: Counter[str]
) -> DatasetPart:
    """Return the part with labels as numbers of the model's classes, found by their names."""
    datasets = need("datasets", "data")
    part.need(column)
    several = is_list(part, column)
    wanted = kind.name == MULTI_LABEL_TEXT.name or kind.head == "tokens"
    if several != wanted:
        holds, predicts = ("lists", "one label") if several else ("single labels", "lists of labels")
        raise DataError(f"column '{column}' of {part.where} holds {holds}, but the model predicts {predicts} for a row")
    index = {name: place for place, name in enumerate(classes)}
    rows = [row if several else [row] for row in _names(part, column)]
    missing = np.array([row is None or any(value is None or value == "" for value in row) for row in rows])
    strange = Counter(value for row, lacks in zip(rows, missing, strict=True) if not lacks
                      for value in row if value not in index)  # fmt: skip
    if strange and unknown == "error":
        shown = ", ".join(f"{format_value(value)} ({count:,})" for value, count in strange.most_common(SHOWN))
        raise DataError(
            f"column '{column}' of {part.where} has {len(strange)} labels that the model does not know: {shown}; its "
            f"labels are {', '.join(classes[:SHOWN])}{', ...' if len(classes) > SHOWN else ''}; correct them, or leave "
            "these rows out with --unknown-labels drop"
        )
    if missing.any() and unknown == "error":
        raise DataError(
            f"{part.row(int(missing.argmax()))} has no label in '{column}', and {int(missing.sum()) - 1:,} more have "
            "none; fill them in, or leave these rows out with --unknown-labels drop"
        )
    unfit = np.array([not lacks and any(value not in index for value in row)
                      for row, lacks in zip(rows, missing, strict=True)])  # fmt: skip
    kept = np.flatnonzero(~missing & ~unfit)
    if not len(kept):
        raise DataError(f"no row of {part.where} has a label of the model in '{column}'; name the data it is meant for")
    for reason, which in (("without a label", missing), ("with an unknown label", unfit)):
        if which.any():
            left_out[reason] += int(which.sum())
    codes = [[index[value] for value in rows[row]] for row in kept]
    feature: Any = datasets.ClassLabel(names=list(classes))
    feature = datasets.List(feature) if several else feature
    labels = datasets.Dataset.from_dict(
        {column: codes if several else [code for [code] in codes]}, features=datasets.Features({column: feature})
    )
    table = part.data.to_dataset() if isinstance(part.data, ArrowTable) else part.data
    others = table.remove_columns(column).select(kept)
    return DatasetPart(datasets.concatenate_datasets([others, labels], axis=1), part.where, part.rows[kept])


def _names(part: DatasetPart, column: str) -> list[Any]:
    """Return the labels of each row as texts, or lists of them."""
    values, several = part.values(column), is_list(part, column)
    feature = part.data.features[column]
    inner = feature.feature if several else feature
    if hasattr(inner, "names"):
        if several:
            return [None if row is None else [inner.int2str(value) for value in row] for row in values]
        return part.class_names(column, values)
    if several:
        return [None if row is None else [_text(value) for value in row] for row in values]
    return [_text(value) for value in values]


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
