"""Entities in sequences of BIO tags, and how many of those predicted are right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    def of_type(self, number: int) -> Ints:
        """Return start and end of the entities of one type, (entity, 2)."""
        return np.stack([self.starts, self.ends], 1)[self.types == number]


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

    def count(self, true: Spans, predicted: Spans, sentence: Ints, sentences: int) -> NDArray[np.float64]:
        """Count entities by sentence and type.

        Args:
            true: The true entities.
            predicted: The predicted entities.
            sentence: The number of each token's sentence, (token,).
            sentences: The number of sentences.

        Returns:
            Four counts of each type, (sentence, type, 4): true entities; predicted ones; those with the tokens and the
            type of a true one; and the largest number of pairs of a predicted and a true entity that share a type and a
            token, where each entity is in at most one pair.
        """
        counts = np.zeros((sentences, len(self.types), 4))
        for number in range(len(self.types)):
            for place, starts in enumerate(_matches(true.of_type(number), predicted.of_type(number))):
                counts[:, number, place] = np.bincount(sentence[starts], minlength=sentences)
        return counts


def _matches(true: Ints, predicted: Ints) -> Iterator[Ints]:
    """Yield where the entities of each count start."""
    yield true[:, 0]
    yield predicted[:, 0]
    numbers = [spans @ (1 + true.max(initial=0) + predicted.max(initial=0), 1) for spans in (true, predicted)]
    same = [np.isin(numbers[side], numbers[1 - side]) for side in (0, 1)]
    yield true[same[0], 0]
    # Entities of one sequence do not overlap, so an exact pair overlaps nothing else and belongs to every best pairing.
    pairs = _pairs(true[~same[0]].tolist(), predicted[~same[1]].tolist())
    yield np.append(true[same[0], 0], np.array(pairs, np.int64))


def _pairs(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> list[int]:
    """Return where the left spans of most pairs of overlapping spans start. Both lists are in order without overlaps.

    From left to right, the two spans at hand are paired if they overlap. Otherwise the one that ends first overlaps
    nothing that comes later, and is skipped.
    """
    one = other = 0
    pairs = list[int]()
    while one < len(left) and other < len(right):
        if left[one][0] < right[other][1] and right[other][0] < left[one][1]:
            pairs.append(left[one][0])
            one, other = one + 1, other + 1
        elif left[one][1] <= right[other][0]:
            one += 1
        else:
            other += 1
    return pairs
