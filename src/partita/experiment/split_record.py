"""The record of a split: how many examples of which labels clients hold."""

from __future__ import annotations

from typing import Any

import torch

from partita.core.data import TableExamples
from partita.core.rng import Key
from partita.core.settings import RunError
from partita.data import Federation
from partita.data.packing import PackedExamples
from partita.experiment.builder import build_data, build_method
from partita.experiment.config import Config

MAX_CLIENTS = 1000  # clients that are recorded, so that ten thousand cost no more
MAX_CLASSES = 100  # with more classes, only sizes are recorded


def describe_split(federation: Federation) -> dict[str, Any] | None:
    """Return the sizes and label counts of the first clients; None if the data is not on this machine.

    Returns:
        "population": number of all clients. "classes": their names; absent if examples have no classes, or each token
        or pixel has its own, or there are more than `MAX_CLASSES`. "clients": for each of the first `MAX_CLIENTS` its
        "name", the sizes "train", "validation" and "test", and with classes the counts "labels" in its training
        examples.
    """
    task = federation.task
    each_part = task.kind.head in ("tokens", "segmentation")
    counted = task.kind.outputs == "classes" and not each_part and len(task.classes) <= MAX_CLASSES
    clients = []
    for name in federation.clients[:MAX_CLIENTS]:
        data = federation[name]
        train = data.train.examples if isinstance(data.train, PackedExamples) else data.train
        assert isinstance(train, TableExamples)
        sizes = {"train": len(train), "validation": len(data.validation), "test": len(data.test)}
        labels = {"labels": _label_counts(federation, train)} if counted else {}
        clients.append({"name": name, **sizes, **labels})
    if not any(client["train"] for client in clients):
        return None
    classes = {"classes": list(task.classes)} if counted else {}
    return {"population": len(federation.clients), **classes, "clients": clients}


def split_of_config(config: Config) -> dict[str, Any]:
    """Load and split the data of a config, and describe the split. No model is built.

    Raises:
        RunError: If the data is not on this machine.
    """
    held = describe_split(build_data(config, build_method(config.method), Key(config.seed)))
    if held is None:
        raise RunError(
            "no client has training examples on this machine; with split.name = 'site', set split.client to the site "
            "whose data is here"
        )
    return held


def _label_counts(federation: Federation, examples: TableExamples) -> list[int]:
    """Count each label. Reads the targets only, because reading inputs may be slow."""
    task = federation.task
    table = getattr(task.train, "examples", task.train)  # engine.cache_frozen wraps the task's own examples
    targets = table.targets[examples.indices]  # (example,) or (example, class)
    counts = torch.bincount(targets, minlength=len(task.classes)) if task.kind.one_class else targets.sum(0)
    return [int(count) for count in counts.tolist()]
