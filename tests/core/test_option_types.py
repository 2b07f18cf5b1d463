"""Which values an option takes, at the edges of its type and range."""

from __future__ import annotations

import math
from typing import Annotated, Any

import pytest

from partita.core import options
from partita.core.options import Range, closest_match, format_name, format_value, matches_type, options_of

LARGEST = options.MAX_NUMBER
JUST = 1e-9


@pytest.mark.parametrize(
    ("hint", "inside", "outside"),
    [
        (options.Count, (1, LARGEST), (0, LARGEST + 1)),
        (options.Whole, (0, LARGEST), (-1, LARGEST + 1)),
        (options.Positive, (JUST, LARGEST), (0, 1.1 * LARGEST)),
        (options.NotNegative, (0, JUST, LARGEST), (-JUST, 1.1 * LARGEST)),
        (options.Share, (0, 0.5, 1), (-JUST, 1 + JUST)),
        (options.PartialShare, (0, 1 - JUST), (-JUST, 1, 1.5)),
        (options.PositiveShare, (JUST, 1), (0, 1 + JUST)),
        (options.Seed, (0, 10**18), (-1, 10**18 + 1)),
        (options.Text, ("", "a"), ("a\nb", 1)),
        (str, ("a", "é\u00a0\u200b"), ("", "a\x00", "\ud800", "\u2028")),
        (int, (-(2**63), 2**63 - 1), (-(2**63) - 1, 2**63, True, 1.0)),
        (float, (1, 1.5), (math.inf, -math.inf, math.nan, True)),
        (Annotated[float, Range(low=0, high=math.inf)], (0, 1e300, math.inf), (-math.inf, math.nan, -1, True)),
        (Annotated[float, Range(low=0)], (0, 1e300), (math.inf, math.nan)),
        (None, (None,), (0, "")),
        (type(None), (None,), (0, "")),
        (int | None, (None, 1), ("", 1.5)),
        (dict[str, int], ({}, {"a": 1, "b": 2}), ({"a": 1, "b": "c"}, {1: 1}, [])),
        (tuple[int, ...], ([], [1], (1, 2)), ([1, "a"], 1)),
    ],
)
def test_values_at_the_edges_of_a_range(hint: Any, inside: tuple[Any, ...], outside: tuple[Any, ...]) -> None:
    assert [value for value in inside if not matches_type(value, hint)] == []
    assert [value for value in outside if matches_type(value, hint)] == []


def nested(depth: int, wrap: Any) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrap", [lambda value: [value], lambda value: (value,), lambda value: {"a": value}])
def test_any_value_is_one_that_toml_holds(wrap: Any) -> None:
    for value in (True, False, 2**63 - 1, 1.5, "a", "", [], {}, [1, "a"], {"a": [1]}, None):
        assert matches_type(value, Any)
        assert matches_type(wrap(value), Any)
    for value in (2**63, math.inf, math.nan, "a\nb"):
        assert not matches_type(value, Any)
        assert not matches_type(wrap(value), Any)
        assert not matches_type([1, value], Any)
        assert not matches_type((value, 1), Any)
        assert not matches_type({"a": 1, "b": value}, Any)
    assert not matches_type({"a\nb": 1}, Any)
    assert matches_type(nested(9, wrap), Any)
    assert not matches_type(nested(10, wrap), Any)


def test_a_range_says_what_it_holds() -> None:
    for bounds, said in (
        (Range(), ""),
        (Range(low=1), "from 1"),
        (Range(high=2), "up to 2"),
        (Range(below=2), "below 2"),
        (Range(above=0), "above 0"),
        (Range(low=0, high=1), "from 0 to 1"),
        (Range(above=0, high=1), "above 0 and up to 1"),
        (Range(low=0, below=1), "from 0 and below 1"),
        (Range(above=0, below=1), "above 0 and below 1"),
    ):
        assert str(bounds) == said


def test_the_meaning_of_an_option_is_the_text_in_its_type() -> None:
    def target(
        plain: dict[str, int], one: Annotated[int, "first", Range(low=1), "second"], two: Annotated[str, Range(low=1)]
    ) -> None: ...

    target.__annotations__ = {
        "plain": dict[str, int],
        "one": Annotated[int, "first", Range(low=1), "second"],
        "two": Annotated[str, Range(low=1)],
    }
    assert {name: option.meaning for name, option in options_of(target).items()} == {
        "plain": "",
        "one": "first second",
        "two": "",
    }


def test_names_and_values_are_shown_on_one_line_and_not_at_length() -> None:
    limit = options.SHOWN_CHARACTERS
    for name in ("a", "x" * limit):
        assert format_name(name) == name
    assert format_name("a\nb") == "'a\\nb'"
    assert len(format_name("x" * (limit + 1))) <= limit + 3
    assert format_name("x" * (limit + 1)) != "x" * (limit + 1)
    exact = ["x" * 5] * ((limit - 2) // 9)
    assert len(format_value("x" * (limit - 2))) == limit
    assert format_value("x" * (limit - 2)) == repr("x" * (limit - 2))
    assert format_value(exact).startswith("['xxxxx'")
    assert closest_match("epsilom", ["epsilon", "epsilons", "delta"]) == "did you mean 'epsilon'?"
