"""Testing promises: all of them in order, or the first broken one."""

from __future__ import annotations

import pytest

from partita.core.options import OptionError
from partita.testing.promises import (
    ConformanceError,
    NotApplicable,
    NotTested,
    Outcome,
    Promise,
    check_all,
    raise_first,
    require,
)


def promise(name: str, error: Exception | None = None, needs: tuple[str, ...] = ()) -> Promise[list[str]]:
    """A promise that notes its name when it is tested, and raises the error."""

    def test(tested: list[str]) -> None:
        tested.append(name)
        if error:
            raise error

    return Promise(name, f"About {name}.", test, needs)


def outcomes(*promises: Promise[list[str]]) -> list[tuple[str, str, str]]:
    return [(each.name, each.verdict, each.reason) for each in check_all(promises, [])]


def test_each_promise_has_an_outcome_with_its_reason() -> None:
    assert outcomes(
        promise("kept"),
        promise("broken", ConformanceError("it is broken")),
        promise("no case", NotApplicable("no case of it")),
        promise("unknown", NotTested("it fails")),
    ) == [
        ("kept", "yes", ""),
        ("broken", "no", "it is broken"),
        ("no case", "not applicable", "no case of it"),
        ("unknown", "not tested", "it fails"),
    ]
    assert next(check_all([promise("kept")], [])) == Outcome("kept", "About kept.", "yes")


@pytest.mark.parametrize(
    ("first", "tested"),
    [
        (None, True),
        (NotApplicable("no case"), True),
        (ConformanceError("broken"), False),
        (NotTested("it fails"), False),
        (KeyError("x"), False),
    ],
)
def test_promise_is_tested_only_if_those_it_needs_are_kept(first: Exception | None, tested: bool) -> None:
    subject: list[str] = []
    found = list(check_all([promise("a", first), promise("b", None, ("a",)), promise("c", None, ("b",))], subject))
    assert subject == (["a", "b", "c"] if tested else ["a"])
    if not tested:
        assert [each.verdict for each in found[1:]] == ["not tested", "not tested"]
        assert [each.reason for each in found[1:]] == ["this needs 'a'", "this needs 'b'"]


def test_error_of_the_tested_code_is_shown_on_one_line_with_its_place() -> None:
    def fail(subject: list[str]) -> None:
        raise RuntimeError("first line\n  second line")

    [outcome] = check_all([Promise("a", "A.", fail)], [])
    line = fail.__code__.co_firstlineno + 1
    assert outcome.verdict == "no"
    assert outcome.reason == f"RuntimeError: first line second line (test_promises.py, line {line})"


def test_wrong_option_is_not_a_broken_promise() -> None:
    with pytest.raises(OptionError, match="x is 3"):
        outcomes(promise("a", OptionError("x is 3")))


@pytest.mark.parametrize("error", [ConformanceError("broken"), KeyError("x")])
def test_raise_first_raises_the_first_error_as_it_is(error: Exception) -> None:
    subject: list[str] = []
    promises = [promise("a", NotApplicable("")), promise("b", NotTested("")), promise("c", error), promise("d")]
    with pytest.raises(type(error)) as caught:
        raise_first(promises, subject)
    assert caught.value is error
    assert subject == ["a", "b", "c"]
    raise_first(promises[:2], subject)


def test_require_raises_only_if_broken() -> None:
    require(True, "kept")
    with pytest.raises(ConformanceError, match=r"^broken$"):
        require(False, "broken")
