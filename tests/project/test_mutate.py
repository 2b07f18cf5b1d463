"""The mutants of scripts/mutate.py, the tests that they are put to, and its verdict."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))  # as when mutate.py is run
mutate = import_module("mutate")


def changes_in(source: str) -> set[str]:
    return {mutant.change for mutant in mutate.mutants("m", source)}


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
        ("x = f(a, b=c, **more)", {"f(a, b=c, **more) -> f(a, **more)"}),
        (
            "def f(a):\n    if a < 0:\n        raise ValueError(a)\n    elif a > b:\n        c = d\n    return -a",
            {"a > b -> a <= b", "a > b -> a >= b", "-a -> a"},
        ),
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


def test_mutant_computes_what_its_change_says() -> None:
    """Over several lines, after multi-byte characters, and inside an operator of higher precedence."""
    source = "def f(a, b):\n    é = 'ü'; return (a\n        + b) * b * a"
    results = {}
    for mutant in mutate.mutants("m", source):
        scope: dict[str, Callable[[int, int], float]] = {}
        exec(mutant.source, scope)
        results[mutant.change] = scope["f"](5, 3)
        assert (mutant.line, mutant.lines) == (2, range(2, 3))
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
    source = "x = 1 + a\ndef f(a):\n    if (a and\n        -b):\n        return (a\n            - b)\n    return -a"
    lines = {mutant.change: mutant.lines for mutant in mutate.mutants("m", source)}
    assert lines["1 + a -> a"] == range(1, 2)
    assert lines["-b -> b"] == range(3, 5), "without the body"
    assert lines["a - b -> a"] == range(5, 6)
    assert lines["-a -> a"] == range(7, 8)


def test_tests_are_those_that_use_the_module_of_its_name_first() -> None:
    """Also through another module, as nothing but the core's noise uses the kernels."""
    assert mutate.tests_of("core/rng.py")[0] == "tests/core/test_rng.py"
    assert 0 < len(mutate.tests_of("core/cuda_kernels.py")) <= 8
    assert mutate.tests_of("methods/scaffold.py")[-1] == f"{mutate.CONFORMANCE}[scaffold]"
    file, _, name = mutate.CONFORMANCE.partition("::")
    assert f"def {name}" in (mutate.ROOT / file).read_text()
    assert all((mutate.PACKAGE / file).exists() for file in mutate.LEFT_OUT)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_report_pass_failure_error_and_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutate.tempfile, "tempdir", str(tmp_path))

    def hang(folder: Path) -> bool:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        time.sleep(60)
        return True

    tasks = {
        "passes": lambda folder: (folder / "here").write_text("said") == 4,
        "fails": lambda folder: False,
        "raises": lambda folder: 1 / 0,
        "dies": lambda folder: os.kill(os.getpid(), signal.SIGKILL),
        "hangs": hang,
    }
    found = {name: (passed, (folder / "here").exists()) for name, folder, passed in mutate.in_processes(tasks, 2)}
    assert found == {"passes": (True, True), **dict.fromkeys(("fails", "raises", "dies", "hangs"), (False, False))}


@pytest.mark.slow
def test_survivors_are_printed_and_too_many_are_an_error(tmp_path: Path) -> None:
    """In a repository with one function, of which a test looks at one branch."""
    core, methods, tests = (tmp_path / name for name in ("src/partita/core", "src/partita/methods", "tests/core"))
    script = tmp_path / "scripts" / "mutate.py"
    for folder in (script.parent, core, methods, tests):
        folder.mkdir(parents=True)
    script.write_text((SCRIPTS / "mutate.py").read_text())
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['slow']\n")
    for folder in (core, methods, methods.parent):
        (folder / "__init__.py").write_text("")
    (core / "rule.py").write_text("def rule(a, b):\n    if a > b:\n        a -= 1\n    return -a\n")
    (tests / "test_rule.py").write_text(
        "from partita.core.rule import rule\n\n\ndef test_rule():\n    assert rule(1, 2) == -1\n"
    )
    done = subprocess.run([sys.executable, str(script), "--files", "core"], text=True, capture_output=True)
    assert sorted(done.stdout.splitlines()) == [
        "core/rule.py:2: a > b -> a >= b",
        "core/rule.py:3: 1 -> 2",
        "core/rule.py:3: a -= 1 -> a += 1",
        "core: 2 of 5 mutants killed, 40%",
    ]
    assert done.returncode == 1
