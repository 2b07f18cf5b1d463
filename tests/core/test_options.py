"""Options checked against a signature: accepted values, refusals, and their messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.core.client_rule import ClientRule
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.optim import SGD
from partita.core.options import (
    OptionError,
    closest_match,
    describe,
    matches_type,
    options_of,
    validate_options,
)
from partita.core.plan import Phase, PlanError
from partita.core.registry import find_function
from partita.core.settings import Training
from partita.core.update_transform import UpdateTransform
from partita.methods import INDEX, build


def target_function(
    rate: float,
    count: int = 3,
    kind: Literal["one", "two"] = "one",
    limit: float | None = None,
    names: tuple[str, ...] = (),
) -> None:
    """A function with options of several types."""


@dataclass(frozen=True)
class Settings:
    size: int
    flag: bool = False


FITS: list[tuple[Any, Any, bool]] = [
    (1, int, True),
    (1.0, int, False),
    (True, int, False),
    (1, float, True),
    (1.5, float, True),
    (True, float, False),
    ("1", float, False),
    ("x", str, True),
    (1, str, False),
    (True, bool, True),
    (1, bool, False),
    (None, type(None), True),
    (None, None, True),
    (None, int, False),
    (None, int | None, True),
    (2, int | None, True),
    ("x", int | None, False),
    (0.5, int | float, True),
    ("one", Literal["one", "two"], True),
    ("three", Literal["one", "two"], False),
    (1, Literal[1, 2], True),
    (True, Literal[1, 2], False),
    (1.0, Literal[1, 2], False),
    ([1, 2], tuple[int, ...], True),
    ((), tuple[int, ...], True),
    ([1, "x"], tuple[int, ...], False),
    ("ab", tuple[str, ...], False),
    (["a"], list[str], True),
    ({"a": 1}, dict[str, int], True),
    ({"a": 1}, Mapping[str, int], True),
    ([], dict[str, int], False),
    (object(), Any, True),
]


@pytest.mark.parametrize(
    ("value", "hint", "expected"), FITS, ids=[f"{value!r} {hint}" for value, hint, _ in FITS[:-1]] + ["any"]
)
def test_matches_type_checks_a_value_against_a_hint(value: Any, hint: Any, expected: bool) -> None:
    assert matches_type(value, hint) is expected


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "a whole number"),
        (float, "a number"),
        (str, "a text of one line that is not empty"),
        (bool, "true or false"),
        (int | None, "a whole number or left out"),
        (int | float, "a whole number or a number"),
        (Literal["one", 2], "'one' or 2"),
        (tuple[int, ...], "a list, each a whole number"),
        (list[str], "a list, each a text of one line that is not empty"),
        (Settings, "Settings"),
    ],
)
def test_describe_puts_a_type_hint_into_words(hint: Any, words: str) -> None:
    assert describe(hint) == words


def test_valid_options_are_returned() -> None:
    assert validate_options(target_function, {"rate": 1}, "method") == {"rate": 1}
    given_all = {"rate": 0.5, "count": 2, "kind": "two", "limit": None, "names": ["a", "b"]}
    assert validate_options(target_function, given_all, "method") == {**given_all, "names": ("a", "b")}
    assert validate_options(Settings, {"size": 3, "flag": True}, "data") == {"size": 3, "flag": True}
    assert validate_options(target_function, {"count": 2}, "method", given=["rate"]) == {"count": 2}
    target_function(**validate_options(target_function, given_all, "method"))
    assert validate_options(lambda size, **rest: None, {"size": 1, "other": "x"}, "split") == {"size": 1, "other": "x"}


@pytest.mark.parametrize(
    ("target", "options", "given_names", "message"),
    [
        (target_function, {"rate": 1, "cuont": 2}, [], r"unknown key 'method.cuont'; did you mean 'count'\?"),
        (
            target_function,
            {"rate": 1, "zzz": 2},
            [],
            "unknown key 'method.zzz'; it can be: count, kind, limit, names, rate",
        ),
        (target_function, {"rate": 1}, ["rate"], r"unknown key 'method.rate'; "),
        (target_function, {}, [], "'method.rate' is missing; it must be a number"),
        (target_function, {"rate": "fast"}, [], "method.rate is 'fast'; it must be a number"),
        (target_function, {"rate": 1, "count": 2.5}, [], "method.count is 2.5; it must be a whole number"),
        (target_function, {"rate": 1, "count": True}, [], "method.count is True; it must be a whole number"),
        (target_function, {"rate": 1, "kind": "three"}, [], "method.kind is 'three'; it must be 'one' or 'two'"),
        (target_function, {"rate": 1, "limit": "x"}, [], "method.limit is 'x'; it must be a number or left out"),
        (target_function, {"rate": 1, "names": [1]}, [], "method.names is .1.; it must be a list, each a text"),
        (Settings, {"flag": True}, [], "'method.size' is missing; it must be a whole number"),
        (Settings, {"size": 1, "flag": 1}, [], "method.flag is 1; it must be true or false"),
        (lambda: None, {"x": 1}, [], "unknown key 'method.x'; there are no options"),
    ],
)
def test_invalid_options_are_refused_with_key_value_and_remedy(
    target: Any, options: dict[str, Any], given_names: list[str], message: str
) -> None:
    with pytest.raises(OptionError, match=f"^{message}"):
        validate_options(target, options, "method", given_names)


@given(
    st.dictionaries(
        st.sampled_from(["lr", "batch_size", "epochs", "clip", "lrr", "precision"]),
        st.integers(-2, 3) | st.sampled_from(["float32", "", "1"]),
    )
)
@settings(max_examples=60)
def test_training_options_are_accepted_or_refused(options: dict[str, Any]) -> None:
    numbers = {key: value for key, value in options.items() if key != "precision"}
    right = "lrr" not in options and all(isinstance(value, int) and value > 0 for value in numbers.values())
    if right and options.get("precision", "float32") == "float32":
        assert validate_options(Training, options, "training") == options
    else:
        with pytest.raises(OptionError, match="training"):
            validate_options(Training, options, "training")


def test_closest_match_and_registry_import_suggest_a_name() -> None:
    assert closest_match("fedprx", INDEX) == "did you mean 'fedprox'?"
    assert closest_match("qqq", ["b", "a"]) == "it can be: a, b"
    assert find_function("method", "fedavg")().name == "fedavg"
    with pytest.raises(OptionError, match=r"unknown method 'fedporx'; did you mean 'fedprox'\?"):
        find_function("method", "fedporx")


def test_methods_are_built_by_name_and_options() -> None:
    for name in INDEX:
        built = build(name)
        assert isinstance(built, Method)
        assert built.name == name
    assert build("fedprox", {"mu": 0.5}).client_rules[0] == build("fedavg+fedprox", {"mu": 0.5}).client_rules[0]
    both = build("fedfrozen+fedprox", {"mu": 0.5, "warmup": 2})
    assert both.name == "fedfrozen+fedprox"
    assert both.client_rules == build("fedprox", {"mu": 0.5}).client_rules


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fedprox", {"nu": 1.0}, r"unknown key 'method.nu'; did you mean 'mu'\?"),
        ("fedprox", {"mu": "big"}, "method.mu is 'big'; it must be a number"),
        ("fednova", {"mu": 1.0}, "unknown key 'method.mu'; there are no options"),
        ("fedfrozen", {"freeze": "values"}, "method.freeze is 'values'; it must be 'kernel' or 'value' or 'mlp' or "),
        (
            "fedfrozen+fedprox",
            {"beta": 1},
            "unknown key 'method.beta'; it can be: seed, .*, mu; 'partita options method.fedfrozen[+]fedprox' explains",
        ),
        ("fedavg+nothing", {}, "unknown method 'nothing'"),
        ("fedprox", {"mu": -1.0}, "method.mu is -1.0; it must be a number from 0 to 1e9"),
        (
            "fedfrozen",
            {"warmup": -1},
            "method.warmup is -1; it must be a whole number from 0 to 1e9 or a number from 0 to 1 or 'auto'",
        ),
        (
            "fedfrozen",
            {"warmup": 1.5},
            "method.warmup is 1.5; it must be a whole number from 0 to 1e9 or a number from 0 to 1 or 'auto'",
        ),
    ],
)
def test_method_with_invalid_name_or_options_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build(name, options)


def test_options_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"method.scope 'value' already says what trains"):
        build("fedfrozen", {"scope": "value", "freeze": "mlp"})


def test_inconsistent_core_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"training\.nesterov needs training\.momentum"):
        SGD(nesterov=True)
    with pytest.raises(PlanError, match="a phase of 0 epochs"):
        Phase(frozenset({"a"}), epochs=0)
    with pytest.raises(MethodError, match="a slot cannot be called 'delta'"):
        Method("m", client_rules=(RuleWithDeltaSlot(),))
    with pytest.raises(MethodError, match="a slot cannot be called 'two words'"):
        Method("m", transforms=(TwoWords(),))


class RuleWithDeltaSlot(ClientRule):
    slots = frozenset({"delta"})


class TwoWords(UpdateTransform):
    slots = frozenset({"two words"})


def test_a_class_without_an_initializer_has_no_options() -> None:
    class Nothing:
        pass

    assert options_of(Nothing) == {}
    with pytest.raises(OptionError, match="there are no options here"):
        validate_options(Nothing, {"size": 1}, "data")
