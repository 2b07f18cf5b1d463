"""What the runs of one process share: nothing by default, and never more than the limit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from partita.core.sharing import share_between_runs, shared


@pytest.fixture(autouse=True)
def keep_nothing_afterwards() -> Iterator[None]:
    yield
    share_between_runs(0)


def result(name: str, built: list[str], size: int = 1) -> str:
    def build() -> str:
        built.append(name)
        return name.upper()

    return shared(lambda: name, build, lambda _: size)


def test_nothing_is_kept_by_default() -> None:
    built: list[str] = []
    assert [result("a", built), result("a", built)] == ["A", "A"]
    assert built == ["a", "a"]


def test_a_result_is_built_once() -> None:
    built: list[str] = []
    share_between_runs(10)
    assert [result(name, built) for name in "abab"] == ["A", "B", "A", "B"]
    assert built == ["a", "b"]


def test_the_least_recently_used_go_first() -> None:
    built: list[str] = []
    share_between_runs(2)
    for name in "abaca":  # c drops b
        result(name, built)
    result("b", built)
    assert built == ["a", "b", "c", "b"]


def test_a_result_above_the_limit_is_not_kept() -> None:
    built: list[str] = []
    share_between_runs(2)
    assert [result("a", built, 3), result("a", built, 3)] == ["A", "A"]
    assert built == ["a", "a"]
