"""How unevenly a split gives examples and classes to clients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from partita.report.split_figure import Split


@dataclass(frozen=True)
class ClientSkew:
    """What one client holds, compared with all clients together. None: the task has no classes, or it has no labels."""

    name: str
    train: int
    classes: int | None  # classes of which it has an example
    entropy: float | None  # of its classes, in bits
    distance: float | None  # total variation distance of its classes from those of all clients, 0 to 1


@dataclass(frozen=True)
class Skew:
    """The skew of a split, over the clients that are listed."""

    clients: Sequence[ClientSkew]
    smallest: int  # training examples
    median: float
    largest: int
    entropy: float | None  # of the classes of all clients together, in bits
    mean_entropy: float | None  # of single clients, weighted by their examples
    mean_distance: float | None  # total variation distance from the pool, weighted by their examples


def skew(split: Split) -> Skew:
    """Return the skew of a split."""
    pool = [sum(counts) for counts in zip(*(client["labels"] for client in split.clients), strict=True)] if (
        split.classes
    ) else []  # fmt: skip
    clients = [
        ClientSkew(
            client["name"],
            client["train"],
            sum(count > 0 for count in labels) if split.classes else None,
            _entropy(labels),
            _distance(labels, pool),
        )
        for client in split.clients
        for labels in [client.get("labels", ())]
    ]
    sizes = [client.train for client in clients]
    return Skew(
        clients,
        min(sizes),
        statistics.median(sizes),
        max(sizes),
        _entropy(pool),
        _weighted([(client.entropy, client.train) for client in clients]),
        _weighted([(client.distance, client.train) for client in clients]),
    )


def _entropy(counts: Sequence[int]) -> float | None:
    total = sum(counts)
    if not total:
        return None
    return abs(sum(count / total * math.log2(count / total) for count in counts if count))


def _distance(counts: Sequence[int], pool: Sequence[int]) -> float | None:
    """Return half the sum of the differences of two distributions: the share of examples that would have to change."""
    own, whole = sum(counts), sum(pool)
    if not own:
        return None
    return sum(abs(count / own - both / whole) for count, both in zip(counts, pool, strict=True)) / 2


def _weighted(values: Sequence[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in values if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None
