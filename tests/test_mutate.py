"""The mutants that scripts/mutate.py makes, and what it says of those that survive."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))  # where Python finds them when mutate.py is run
mutate, trials = (import_module(name) for name in ("mutate", "trials"))


def changes(source: str, **scope: object) -> set[str]:
    return {mutant.change for mutant in mutate.mutants("m", source, scope)}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a + b", {"a + b -> a - b", "a + b -> a", "a + b -> b"}),
        ("a - b", {"a - b -> a + b", "a - b -> a"}),
        ("a * b", {"a * b -> a / b", "a * b -> a", "a * b -> b"}),
        ("a * a", {"a * a -> a / a", "a * a -> a"}),
        ("a / b", {"a / b -> a * b", "a / b -> a"}),
        ("a | b", {"a | b -> a", "a | b -> b"}),
        ("a & b", {"a & b -> a", "a & b -> b"}),
        ("-a", {"-a -> a"}),
        ("not a", {"not a -> a"}),
        ("a += b", {"a += b -> a -= b"}),
        ("a < b", {"a < b -> a >= b", "a < b -> a <= b"}),
        ("a == b", {"a == b -> a != b"}),
        ("a is None", {"a is None -> a is not None"}),
        ("a and b and c", {f"a and b and c -> {rest}" for rest in ("a and b", "a and c", "b and c")}),
        ("a or b", {"a or b -> a", "a or b -> b"}),
        ("a[0.5]", {"0.5 -> 1.5"}),
        ("lambda a: -a", {"-a -> a"}),
        ("x: int = -a", {"-a -> a"}),
        ("if a < b:\n    c()", {"a < b -> a >= b", "a < b -> a <= b"}),
        ("[each for each in some if each != a]", {"each != a -> each == a"}),
    ],
)
def test_what_is_changed(source: str, expected: set[str]) -> None:
    assert changes(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "if a < 0:\n    raise ValueError(a + 1)",
        "def f():\n    raise ValueError(a - b)",
        "def f(a: int | float = 1 + 2) -> int | None: ...",
        "@decorated(1 + 1)\ndef f(): ...",
        "class A:\n    beta: float = 0.9 * 2",
        "x: int | None",
        "lambda a=1: a",
        "f'{a + 1}'",
        "'''A docstring of 3 - 2 words.'''",
        "key / 'round' / f'{a}'",
        "f(True)",
        "zip(a, b, strict=True)",
        "f(**more)",
    ],
)
def test_what_is_left_alone(source: str) -> None:
    assert changes(source) == set()


def test_the_rest_of_a_function_that_raises_is_changed() -> None:
    source = "def f(a):\n    if a < 0:\n        raise ValueError(a)\n    elif a > b:\n        c()\n    return -a"
    assert changes(source) == {"a > b -> a <= b", "a > b -> a >= b", "-a -> a"}


def test_a_keyword_goes_where_the_function_can_do_without_it() -> None:
    def call(needed: int, spare: int = 0, **others: int) -> None: ...

    source = "call(needed=a, spare=b, more=c)"
    both = {"call(...) without spare=b", "call(...) without more=c"}
    assert changes(source, call=call) == both
    assert changes(source) == {*both, "call(...) without needed=a"}, "of a function it does not know it tries all"


def test_a_mutant_computes_what_its_change_says() -> None:
    """Over several lines, after letters of several bytes, and inside a stronger operator."""
    source = "def f(a, b):\n    é = 'ü'; return (a\n        + b) * b * a"
    results = {}
    for mutant in mutate.mutants("m", source, {}):
        scope: dict[str, Callable[[int, int], float]] = {}
        exec(mutant.source, scope)
        results[mutant.change] = scope["f"](5, 3)
        assert (mutant.line, mutant.text) == (2, "é = 'ü'; return (a")
    assert results == {
        "(a + b) * b * a -> (a + b) * b / a": 24 / 5,
        "(a + b) * b * a -> (a + b) * b": 24,
        "(a + b) * b * a -> a": 5,
        "(a + b) * b -> (a + b) / b": 8 / 3 * 5,
        "(a + b) * b -> a + b": 40,
        "(a + b) * b -> b": 15,
        "a + b -> a - b": 30,
        "a + b -> a": 75,
        "a + b -> b": 45,
    }


# ---- the verdict

ONE, TWO = mutate.mutants("fake", "x = a - b", {})
WHY = {ONE.spot: "they are equal"}


def test_a_survivor_is_reported() -> None:
    verdict = mutate.Verdict({"fake": 2, "calm": 0}, [ONE], {})
    assert verdict.problems() == ["fake.py:1: a - b -> a + b   in: x = a - b"]
    assert mutate.markdown(verdict).splitlines() == [
        "| method | mutants | killed | equivalent | survived |",
        "| --- | --: | --: | --: | --: |",
        "| fake | 2 | 1 | 0 | 1 |",
        "| calm | 0 | 0 | 0 | 0 |",
        "| all | 2 | 1 | 0 | 1 |",
        "",
        "Nothing to mutate in: calm.",
        "",
        "- `fake.py:1: a - b -> a + b   in: x = a - b`",
    ]


def test_a_survivor_with_a_reason_is_not() -> None:
    verdict = mutate.Verdict({"fake": 2}, [ONE], WHY)
    assert verdict.problems() == []
    assert verdict.rows() == [mutate.Row("fake", mutants=2, killed=1, equivalent=1, survived=0)]


def test_a_reason_without_a_survivor_is_reported() -> None:
    [problem] = mutate.Verdict({"fake": 2}, [], WHY).problems()
    assert "EQUIVALENT explains a - b -> a + b" in problem
    assert mutate.Verdict({"other": 2}, [], WHY).problems() == [], "that file was not looked at"


def test_a_file_of_which_nothing_is_killed_is_reported() -> None:
    why = {mutant.spot: "they are equal" for mutant in (ONE, TWO)}
    assert "not one of its mutants was killed" in mutate.Verdict({"fake": 2}, [ONE, TWO], why).problems()[0]


def test_every_reason_is_of_a_mutant_that_there_is() -> None:
    for file, text, change in mutate.EQUIVALENT:
        source = (trials.METHODS / f"{file}.py").read_text(encoding="utf-8")
        assert (file, text, change) in {mutant.spot for mutant in mutate.mutants(file, source, {})}


def test_the_tests_that_it_names_are_there() -> None:
    for name in {trials.CONFORMANCE, *(name for names in trials.MORE_TESTS.values() for name in names)}:
        file, _, function = name.partition("::")
        assert f"def {function}" in (trials.ROOT / file).read_text(encoding="utf-8")


# ---- the processes


def trial(source: str, limit: float = 60.0) -> Any:
    return trials.Trial("fake", source, (), limit)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_each_trial_ends_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(trial: Any, folder: Path) -> None:
        (folder / "log").write_text(trial.source)
        time.sleep(60 * (trial.source == "hangs"))
        sys.exit(trial.source == "fails")

    monkeypatch.setattr(trials, "attempt", attempt)
    asked = [trial("passes"), trial("fails"), trial("hangs", limit=0.2)]
    found = {each.said: (each.trial.source, each.passed) for each in trials.outcomes(asked, 2)}
    assert found == {"passes": ("passes", True), "fails": ("fails", False), "hangs": ("hangs", False)}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_trial_that_the_machine_ends_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "attempt", lambda trial, folder: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(SystemExit, match="the tests of fake died by signal 9"):
        list(trials.outcomes([trial("")], 1))
