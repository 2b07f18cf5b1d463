"""Entities in sequences of BIO tags, and how many of those predicted are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Spans:
    """Entities in a sequence of tokens, in order. They do not overlap.

    An entity starts with B-type and goes on as long as I-type follows, as in IOB2. An I-type without its B-type is no
    entity.
    """

    starts: Ints  # (entity,), position of the first token
    ends: Ints  # (entity,), position after the last token
    types: Ints  # (entity,), number of the type

    def of_type(self, number: int) -> list[tuple[int, int]]:
        """Return (start, end) of the entities of one type."""
        chosen = self.types == number
        return list(zip(self.starts[chosen].tolist(), self.ends[chosen].tolist(), strict=True))


@dataclass(frozen=True)
class Counts:
    """Numbers of entities.

    Attributes:
        true: True entities.
        predicted: Predicted entities.
        exact: Predicted entities with the tokens and the type of a true one.
        overlapping: Largest number of pairs of a predicted and a true entity that share a type and a token, where each
            entity is in at most one pair.
    """

    true: int = 0
    predicted: int = 0
    exact: int = 0
    overlapping: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.true + other.true,
            self.predicted + other.predicted,
            self.exact + other.exact,
            self.overlapping + other.overlapping,
        )

    def scores(self) -> dict[str, float]:
        """Return precision, recall and F1 of strict and of relaxed matching; none if there is no entity at all."""
        if not self.true and not self.predicted:
            return {}
        strict = zip(("precision", "recall", "f1"), self._rates(self.exact), strict=True)
        relaxed = zip(("relaxed_precision", "relaxed_recall", "relaxed_f1"), self._rates(self.overlapping), strict=True)
        return {**dict(strict), **dict(relaxed)}

    def _rates(self, right: int) -> tuple[float, float, float]:
        precision = right / self.predicted if self.predicted else 0.0
        recall = right / self.true if self.true else 0.0
        return precision, recall, 2 * precision * recall / (precision + recall) if right else 0.0


class TagScheme:
    """What each tag stands for.

    Args:
        tags: The name of each class: "O", "B-type" or "I-type".
    """

    def __init__(self, tags: Sequence[str]) -> None:
        self.types = tuple(sorted({tag[2:] for tag in tags if tag != "O"}))
        self.begins = np.array([tag.startswith("B-") for tag in tags])  # (tag,)
        self.inside = np.array([tag.startswith("I-") for tag in tags])  # (tag,)
        self.type_of = np.array([-1 if tag == "O" else self.types.index(tag[2:]) for tag in tags])  # (tag,)

    def spans(self, tags: NDArray[Any], first: NDArray[np.bool_]) -> Spans:
        """Return the entities.

        Args:
            tags: The tag of each token, (token,).
            first: Whether a token is the first of its sentence, (token,).
        """
        if not len(tags):
            return Spans(*(np.zeros(0, np.int64) for _ in range(3)))
        types = self.type_of[tags]
        follows = self.inside[tags] & ~first
        follows[1:] &= types[1:] == types[:-1]
        follows[0] = False
        # A run is a token and the tags that go on with its type. It is an entity if it starts with B-type.
        starts = np.flatnonzero(~follows)
        ends = np.append(starts[1:], len(tags))
        entity = self.begins[tags[starts]]
        return Spans(starts[entity], ends[entity], types[starts[entity]])

    def count(self, true: Spans, predicted: Spans) -> list[Counts]:
        """Return the counts of each type, (type,)."""
        return [_count(true.of_type(number), predicted.of_type(number)) for number in range(len(self.types))]


def _count(true: list[tuple[int, int]], predicted: list[tuple[int, int]]) -> Counts:
    exact = set(true) & set(predicted)
    # Entities of one sequence do not overlap, so an exact pair overlaps nothing else and belongs to every best pairing.
    rest = [[span for span in spans if span not in exact] for spans in (true, predicted)]
    return Counts(len(true), len(predicted), len(exact), len(exact) + _pairs(*rest))


def _pairs(left: Sequence[tuple[int, int]], right: Sequence[tuple[int, int]]) -> int:
    """Return the largest number of pairs of overlapping spans. Both lists are in order and without overlaps.

    From left to right, the two spans at hand are paired if they overlap. Otherwise the one that ends first overlaps
    nothing that comes later, and is skipped.
    """
    one = other = pairs = 0
    while one < len(left) and other < len(right):
        if left[one][0] < right[other][1] and right[other][0] < left[one][1]:
            pairs, one, other = pairs + 1, one + 1, other + 1
        elif left[one][1] <= right[other][0]:
            one += 1
        else:
            other += 1
    return pairs
