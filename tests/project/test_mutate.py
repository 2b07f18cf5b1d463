"""The mutants of scripts/mutate.py, and its report on survivors."""

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

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))  # as when mutate.py is run
mutate, trials, mutation_tests, coverage = (
    import_module(name) for name in ("mutate", "trials", "mutation_tests", "coverage_by_test")
)


def changes_in(source: str, **scope: object) -> set[str]:
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
        ("if a < b:\n    c = d", {"a < b -> a >= b", "a < b -> a <= b"}),
        ("[each for each in some if each != a]", {"each != a -> each == a"}),
        ("if a:\n    b = c", {"a -> not a"}),
        ("while a():\n    b = c", {"a() -> not a()"}),
        ("[each for each in some if each]", {"each -> not each"}),
        ("a if b else c", {"b -> not b"}),
        ("~a", {"~a -> a"}),
        ("a(b)\nc = d(e)", {"a(b) -> None"}),
        ("x = min(a, b)", {"min(a, b) -> max(a, b)"}),
        ("x = a.all()", {"a.all() -> a.any()"}),
        ("x = f(True)", {"True -> False"}),
    ],
)
def test_mutants_cover_operators_conditions_and_calls(source: str, expected: set[str]) -> None:
    assert changes_in(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "if a < 0 or b():\n    raise ValueError(a + 1)",
        "def f():\n    raise ValueError(a - b)",
        "def f(a: int | float = 1 + 2) -> int | None: ...",
        "@decorated(1 + 1)\ndef f(): ...",
        "class A:\n    beta: float = 0.9 * 2",
        "x: int | None",
        "lambda a=1: a",
        "f'{a + 1}'",
        "'''A docstring of 3 - 2 words.'''",
        "key / 'round' / f'{a}'",
        "x = zip(a, b, strict=True)",
        "x = a.to(b, non_blocking=True)",
        "x = f(**more)",
        "LARGE = 2 * 3",
    ],
)
def test_mutants_skip_errors_annotations_and_constants(source: str) -> None:
    assert changes_in(source) == set()


def test_mutants_cover_the_rest_of_a_function_that_raises() -> None:
    source = "def f(a):\n    if a < 0:\n        raise ValueError(a)\n    elif a > b:\n        c = d\n    return -a"
    assert changes_in(source) == {"a > b -> a <= b", "a > b -> a >= b", "-a -> a"}


def test_mutants_drop_optional_keyword_arguments() -> None:
    def call(needed: int, spare: int = 0, **others: int) -> None: ...

    source = "x = call(needed=a, spare=b, more=c)"
    both = {"call(...) without spare=b", "call(...) without more=c"}
    assert changes_in(source, call=call) == both
    assert changes_in(source) == {*both, "call(...) without needed=a"}, "of a function it does not know it tries all"


def test_mutant_computes_what_its_change_says() -> None:
    """Over several lines, after multi-byte characters, and inside an operator of higher precedence."""
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


def test_mutant_knows_the_lines_of_its_statement() -> None:
    source = "x = 1 + a\ndef f(a):\n    if (a <\n        b):\n        return (a\n            - b)\n    return -a"
    lines = {mutant.change: mutant.lines for mutant in mutate.mutants("m", source, {})}
    assert lines["1 + a -> a"] is None, "it runs when the file is imported"
    assert lines["a < b -> a >= b"] == range(3, 5), "without the body"
    assert lines["a - b -> a"] == range(5, 7)
    assert lines["-a -> a"] == range(7, 8)


# ---- the verdict

ONE, TWO = mutate.mutants("fake.py", "x = a - b", {})
REASON = {ONE.spot: "they are equal"}


def make_verdict(
    passed: list[Any], equivalent: Any = None, uncovered: Any = None, tried: Any = (ONE, TWO), whole: bool = True
) -> Any:
    return mutate.Verdict(["fake.py", "calm.py"], tried, passed, equivalent or {}, uncovered or {}, whole)


def test_surviving_mutant_is_reported() -> None:
    verdict = make_verdict([ONE])
    assert verdict.problems() == ["fake.py:1: a - b -> a + b   in: x = a - b"]
    assert mutate.markdown(verdict).splitlines() == [
        "| file | mutants | killed | equivalent | uncovered | survived |",
        "| --- | --: | --: | --: | --: | --: |",
        "| fake.py | 2 | 1 | 0 | 0 | 1 |",
        "| calm.py | 0 | 0 | 0 | 0 | 0 |",
        "| all | 2 | 1 | 0 | 0 | 1 |",
        "",
        "Nothing to mutate in: calm.py.",
        "",
        "- `fake.py:1: a - b -> a + b   in: x = a - b`",
    ]


def test_surviving_mutant_with_a_reason_is_not_reported() -> None:
    verdict = make_verdict([ONE], REASON)
    assert verdict.problems() == []
    assert verdict.rows()[0] == mutate.Row("fake.py", mutants=2, killed=1, equivalent=1, uncovered=0, survived=0)
    verdict = make_verdict([ONE], uncovered=REASON)
    assert verdict.problems() == []
    assert verdict.rows()[0] == mutate.Row("fake.py", mutants=2, killed=1, equivalent=0, uncovered=1, survived=0)


def test_one_reason_covers_all_mutants_of_a_line() -> None:
    line = {("fake.py", "x = a - b", mutate.ANY): "it is never looked at"}
    assert make_verdict([ONE], line).problems() == []
    assert make_verdict([ONE], line).rows()[0].equivalent == 1
    assert "but no such mutant survives" in make_verdict([], line).problems()[0]


def test_reason_without_a_surviving_mutant_is_reported() -> None:
    [problem] = make_verdict([], REASON).problems()
    assert "survivors.py explains a - b -> a + b" in problem
    assert make_verdict([], uncovered=REASON).problems() == [problem]
    assert make_verdict([], REASON, tried=[TWO]).problems() == [problem], "there is no such mutant any more"
    assert make_verdict([], REASON, tried=[TWO], whole=False).problems() == [], "that mutant was not tried"
    elsewhere = {("other.py", *ONE.spot[1:]): "they are equal"}
    assert make_verdict([], elsewhere).problems() == [], "that file was not looked at"


def test_file_without_killed_mutants_is_reported() -> None:
    why = {mutant.spot: "they are equal" for mutant in (ONE, TWO)}
    assert "not one of its mutants was killed" in make_verdict([ONE, TWO], why).problems()[0]


def test_every_listed_reason_matches_a_mutant() -> None:
    listed = {**mutate.EQUIVALENT, **mutate.UNCOVERED}
    assert len(listed) == len(mutate.EQUIVALENT) + len(mutate.UNCOVERED), "one reason is enough"
    for file in sorted({file for file, _, _ in listed}):
        source = (trials.PACKAGE / file).read_text(encoding="utf-8")
        there = {spot for mutant in mutate.mutants(file, source, {}) for spot in mutate.spots(mutant)}
        assert {spot for spot in listed if spot[0] == file} <= there


def test_mutation_tests_name_existing_files_and_tests() -> None:
    held = {**mutation_tests.HELD_BY, **mutation_tests.MORE_TESTS}
    for name in {mutation_tests.CONFORMANCE, *(name for names in held.values() for name in names)}:
        file, _, function = name.partition("::")
        assert f"def {function.partition('[')[0]}" in (trials.ROOT / file).read_text(encoding="utf-8")
    for file in (*mutation_tests.LEFT_OUT, *held):
        assert (trials.PACKAGE / file).is_file()
    assert {"training/local_training.py", "privacy/spending.py", "methods/scaffold.py"} <= set(mutation_tests.known())
    assert all(mutation_tests.tests_of(file) for file in mutation_tests.known())
    assert "training/cuda_graphs.py" not in mutation_tests.known()


def test_mutants_are_chosen_by_line_and_sample() -> None:
    made = list(mutate.mutants("m", "x = a - b\ny = a * b * c", {}))
    assert mutate.choose(made, "", None, 0) == made
    assert {mutant.line for mutant in mutate.choose(made, "y =", None, 0)} == {2}
    some = mutate.choose(made, "", 3, 0)
    assert (len(some), some) == (3, mutate.choose(made, "", 3, 0))
    assert any(some != mutate.choose(made, "", 3, seed) for seed in range(1, 9))


# ---- the tests of a mutant


def test_mutant_is_assigned_the_tests_that_run_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, outside = (
        next(mutate.mutants("m", source, {})) for source in ("def f(a, b):\n    return a - b", "x = a - b")
    )
    traces = {
        "a::slow": coverage.Trace(9.0, {"m": [2]}),
        "a::fast": coverage.Trace(0.1, {"m": [1, 2, 3]}),
        "b::elsewhere": coverage.Trace(0.2, {"m": [3]}),
        "c::other": coverage.Trace(0.3, {"n": [2]}),
    }
    assert coverage.tests_for(inside, traces) == (["a::fast", "a::slow"], [])
    assert coverage.tests_for(outside, traces) == (["a::fast", "a::slow"], ["b::elsewhere", "c::other"])
    monkeypatch.setattr(coverage, "FEW", 0.05)
    assert coverage.tests_for(inside, traces) == (["a::fast"], ["a::slow"])
    monkeypatch.setattr(coverage, "ENOUGH", 0.25)
    assert coverage.tests_for(outside, traces) == (["a::fast"], ["b::elsewhere", "c::other"])
    assert coverage.tests_for(inside, {}) == ([], [])
    monkeypatch.setattr(coverage, "FEW", 1.0)
    seconds = {"a::1": 0.1, "a::2": 1.5, "a::3": 1.6, "b::1": 0.2, "b::2": 0.3, "b::3": 0.4}
    found = coverage.tests_for(outside, {test: coverage.Trace(spent, {}) for test, spent in seconds.items()})
    assert found[0] == ["b::1", "b::2", "b::3"], "the file with most tests in a second"


def test_lines_are_recorded_by_test(tmp_path: Path) -> None:
    source = tmp_path / "code_under_test.py"
    source.write_text("def f(a):\n    if a:\n        return 1\n    return [\n        a for _ in range(2)\n    ]\n")
    own: dict[str, Any] = {}
    exec(compile(source.read_text(), source, "exec"), own)
    recorder = coverage.Recorder({str(source): "m"})
    for test, value in (("t.py", None), ("t.py::one", 1), ("t.py::two", 0)):
        record = recorder._record(test)
        next(record)
        if value is not None:
            own["f"](value)
        with pytest.raises(StopIteration):
            record.send(None)
        recorder.seconds[test] = 0.0
    found = recorder.found()
    assert found["t.py::one"] == (0.0, {"m": [2, 3]})
    assert found["t.py::two"][1]["m"][:2] == [2, 4]
    assert found["t.py"] == (0.0, {})


# ---- trials


def make_trial(source: str, limit: float = 60.0) -> Any:
    return trials.Trial((), "fake.py", source, {"test": limit})


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_trials_report_pass_failure_and_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(trial: Any, folder: Path) -> None:
        (folder / "log").write_text(trial.source)
        time.sleep(60 * (trial.source == "hangs"))
        sys.exit(trial.source == "fails")

    monkeypatch.setattr(trials, "attempt", attempt)
    asked = [make_trial("passes"), make_trial("fails"), make_trial("hangs", limit=0.2)]
    found = {each.said: (each.trial.source, each.passed) for each in trials.outcomes(asked, 2)}
    assert found == {"passes": ("passes", True), "fails": ("fails", False), "hangs": ("hangs", False)}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_trial_killed_by_a_signal_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "attempt", lambda trial, folder: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(SystemExit, match=r"the tests of fake\.py died by signal 9"):
        list(trials.outcomes([make_trial("")], 1))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_mutant_replaces_its_module_for_all_importers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a separate process, where all modules that imported the original are reloaded."""
    test = tmp_path / "test_rate.py"
    test.write_text(
        "from partita.core.settings import Training\nimport partita.core.optim\n"
        "def test_rate():\n    assert partita.core.optim.MARK == 1\n"
        "    assert Training(lr=1.0).schedule.__class__ is partita.core.optim.Schedule\n"
    )
    source = (trials.PACKAGE / "core/optim.py").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    asked = [trials.Trial((str(test),), "core/optim.py", f"{source}\nMARK = {mark}\n") for mark in (1, 2)]
    assert [each.passed for each in trials.outcomes(asked, 1)] == [True, False]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_test_that_never_ends_is_stopped_at_its_own_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = tmp_path / "test_loop.py"
    test.write_text("def test_loop():\n    while True:\n        pass\ndef test_last():\n    pass\n")
    monkeypatch.chdir(tmp_path)
    limits = {"test_loop.py::test_loop": 0.1, "test_loop.py::test_last": 1000.0}
    [found] = trials.outcomes([trials.Trial((str(test),), limits=limits)], 1)
    assert not found.passed
    assert found.seconds < 60
