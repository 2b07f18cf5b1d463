"""One field for each quantity of a row: what readers check, what is withheld, and what trackers and frames show."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, TypedDict, get_type_hints

import pytest

from partita.record import row as rows
from partita.record.check import Count, ShapeError, check_of
from partita.record.metric import Metric
from partita.record.row import QUANTITIES, Quantity, Row, check_row, numbers


def test_every_field_has_one_quantity_and_every_status_a_reason() -> None:
    assert list(QUANTITIES) == list(get_type_hints(Row))
    assert all(quantity.why for quantity in QUANTITIES.values())


def test_a_field_without_a_privacy_status_is_a_type_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Undecided(TypedDict, total=False):
        round: Annotated[int, Quantity("public", "public", "the schedule")]
        secret_number: int

    monkeypatch.setattr(rows, "Row", Undecided)
    with pytest.raises(TypeError, match=r"^Row\.secret_number has 0 quantities; give it exactly one"):
        rows._quantities()


def test_what_names_clients_is_never_public_under_client_level_privacy_but_layer_choices() -> None:
    naming = {name: quantity.client for name, quantity in QUANTITIES.items() if quantity.clients}
    assert {name for name, status in naming.items() if status == "public"} == {"chosen"}


WRONG = [
    ({}, "the row has no 'round'"),
    ([1], "the row is [1]; it must be a table"),
    ({"round": -1}, "the row.round is -1; it must be a whole number from 0 up"),
    ({"round": True}, "the row.round is True; it must be a whole number"),
    ({"round": 0, "lr": "0.1"}, "the row.lr is '0.1'; it must be a number"),
    ({"round": 0, "skipped": 1}, "the row.skipped is 1; it must be true or false"),
    ({"round": 0, "cohort": ["a", 1]}, "the row.cohort[1] is 1; it must be a string"),
    ({"round": 0, "lost": ["a"]}, "the row.lost is ['a']; it must be a table"),
    ({"round": 0, "drift": {"head": {"cosine": "x"}}}, "the row.drift.head.cosine is 'x'; it must be a number"),
    ({"round": 0, "chosen": {"a": ["head"]}}, "the row.chosen.a[0] is 'head'; it must be a layer such as 'layer.0'"),
    ({"round": 0, "scores": {"a": {"x": 1.0}}}, "a key of the row.scores.a is 'x'; it must be a layer such as"),
    ({"round": 0, "subgroups": {}}, "the row.subgroups has no 'groups'"),
    (
        {"round": 0, "confusion": {"classes": ["a"], "counts": [[1, 2]]}},
        "the row.confusion.counts does not have a row and a column for each of the classes",
    ),
]


@pytest.mark.parametrize(("value", "words"), WRONG)
def test_wrong_values_are_named(value: Any, words: str) -> None:
    with pytest.raises(ShapeError) as error:
        check_row(value)
    assert str(error.value).startswith(words)


def test_reading_keeps_known_keys_and_drops_others() -> None:
    row = {"round": 2, "test": {"accuracy": math.nan}, "drift": None, "secure": None, "added_later": 1}
    found = check_row(json.loads(json.dumps(row)))
    assert found.keys() == {"round", "test", "drift", "secure"}


def test_numbers_are_named_by_their_path() -> None:
    row: Row = {
        "round": 1,
        "cohort": ["a", "b", "c"],
        "personal": {"loss": {"a": 1.0, "b": 3.0, "c": math.inf}},
        "validation": {"accuracy": 0.5},
    }
    assert dict(numbers(row, [Metric("loss", higher_is_better=False)])) == {
        ("round",): 1,
        ("clients", "sampled"): 3,
        ("validation", "accuracy"): 0.5,
        ("personal", "loss", "mean"): 2.0,
        ("personal", "loss", "worst_tenth"): 3.0,
    }


def test_a_check_follows_the_type() -> None:
    class Needed(TypedDict):
        name: str

    class Whole(Needed, total=False):
        counts: list[Count] | None

    check = check_of(Whole)
    assert check({"name": "x", "counts": None, "more": 1}, "it") == {"name": "x", "counts": None}
    for value, words in (
        ({"counts": []}, "it has no 'name'"),
        ({"name": "x", "counts": [1, -1]}, r"it\.counts\[1\] is -1; it must be a whole number from 0 up"),
    ):
        with pytest.raises(ShapeError, match=words):
            check(value, "it")
