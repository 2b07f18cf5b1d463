"""Weighted means over a stream of updates, against sums by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from partita.core.server_rule import average
from partita.core.update import Update


def make_update(weight: float, slot: float | None = None, **values: float) -> Update:
    delta = {name: torch.tensor([value]) for name, value in values.items()}
    slots = {} if slot is None else {"seen": {"x": torch.tensor([slot])}}
    return Update("c", delta, slots, weight, dict.fromkeys(delta, 1), None)


def stream() -> Iterator[Update]:
    """Three clients of weights 1, 3 and 4: one sends no y, one sends no slot."""
    yield make_update(1.0, slot=2.0, x=4.0, y=8.0)
    yield make_update(3.0, x=8.0)
    yield make_update(4.0, slot=12.0, x=1.0, y=3.0)


@pytest.mark.parametrize(
    ("over", "delta", "seen"),
    [
        ("senders", {"x": 32 / 8, "y": 20 / 5}, 50 / 5),
        ("cohort", {"x": 32 / 8, "y": 20 / 8}, 50 / 8),
        (16.0, {"x": 32 / 16, "y": 20 / 16}, 50 / 16),
    ],
)
def test_average_divides_weighted_sums_by_the_given_weight(over: str, delta: dict[str, float], seen: float) -> None:
    found = average(stream(), over)  # type: ignore[arg-type]
    assert {name: value.item() for name, value in found.delta.items()} == pytest.approx(delta)
    assert found.slots.keys() == {"seen"}
    assert found.slots["seen"]["x"].item() == pytest.approx(seen)
    assert found.cohort == 3


def test_average_is_over_senders_with_their_example_counts_by_default() -> None:
    found, expected = average(stream()), average(stream(), "senders", lambda update: update.weight)
    assert {name: value.item() for name, value in found.delta.items()} == pytest.approx({"x": 4.0, "y": 4.0})
    assert found.delta == expected.delta


def test_average_with_equal_weights_is_the_plain_mean() -> None:
    found = average(stream(), "cohort", lambda update: 1.0)
    assert {name: value.item() for name, value in found.delta.items()} == pytest.approx({"x": 13 / 3, "y": 11 / 3})


def test_average_of_no_updates_is_empty() -> None:
    for over in ("senders", "cohort"):
        found = average([], over)  # type: ignore[arg-type]
        assert (found.delta, found.slots, found.cohort) == ({}, {}, 0)
