"""Which cases of a test are fast, and what is said of fast tests that are not."""

from __future__ import annotations

import pytest
from budget import SHOWN, TIER_SECONDS, mark_other_cases_slow, over_budget, spread


@pytest.mark.parametrize(
    ("count", "wanted", "places"),
    [(5, 1, {0}), (5, 2, {0, 4}), (5, 3, {0, 2, 4}), (2, 3, {0, 1}), (9, 4, {0, 2, 5, 8})],
)
def test_fast_cases_are_spread_from_the_first_to_the_last(count: int, wanted: int, places: set[int]) -> None:
    assert spread(count, wanted) == places


def test_nothing_is_said_within_the_budget() -> None:
    assert over_budget({"a": 0.9, "b": 0.1}, TIER_SECONDS, 2) == []
    assert over_budget({"a": 0.9}, 2 * TIER_SECONDS, 1) == [], "one worker may take twice as long"


def test_long_tests_and_a_long_tier_are_named() -> None:
    first, longest, other, last = over_budget({"a": 0.9, "b": 1.5, "c": 20.0}, 300, 2)
    assert first.startswith("2 tests took more than 1 s")
    assert longest.split() == ["20.0", "s", "c"]
    assert other.split() == ["1.5", "s", "b"]
    assert last.startswith("They took 300 s on 2 worker(s). The budget is 180 s on 2")
    many = over_budget(dict.fromkeys(map(str, range(SHOWN + 3)), 2.0), 10, 2)
    assert (len(many), many[-1]) == (SHOWN + 2, "and 3 more")


@pytest.mark.fast_cases("here")
@pytest.mark.parametrize("place", [pytest.param(0, id="here"), pytest.param(1, id="there")])
def test_cases_can_be_chosen_by_name(place: int, request: pytest.FixtureRequest) -> None:
    slow = request.node.get_closest_marker("slow") is not None
    assert slow == bool(place)


def test_a_name_without_a_case_is_an_error(request: pytest.FixtureRequest) -> None:
    case = pytest.Function.from_parent(request.node.parent, name="f[here]", callobj=lambda: None, originalname="f")
    case.add_marker(pytest.mark.fast_cases("nowhere"))
    with pytest.raises(pytest.UsageError, match=r"fast_cases of .* names no case: f\[nowhere\]"):
        mark_other_cases_slow([case], ["tests"])
    mark_other_cases_slow([case], ["tests/test_of_something.py::f[here]"])
    assert case.get_closest_marker("slow")
