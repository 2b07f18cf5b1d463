"""Which test runs which lines: a plugin for pytest, and the tests that a mutant must pass."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from types import FrameType
from typing import Any, NamedTuple

import pytest
from mutants import Mutant

FEW = 1.0  # seconds of tests from one file: the one with most tests that fit
ENOUGH = 30.0  # seconds of tests, as long as they take unbroken, after which a mutant is believed to survive


class Trace(NamedTuple):
    seconds: float  # of computing
    lines: Mapping[str, list[int]]  # by file


class Recorder:
    """Records lines by test. What is run while a file of tests is collected counts for each of its tests."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = files  # from a path to what the file is called
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.now = ""

    def found(self) -> dict[str, tuple[float, dict[str, list[int]]]]:
        return {test: (seconds, self._lines(test)) for test, seconds in self.seconds.items()}

    def _lines(self, test: str) -> dict[str, list[int]]:
        shared = self.lines[test.partition("::")[0]]
        own = self.lines[test]
        return {file: sorted(own[file] | shared[file]) for file in self.files.values() if own[file] | shared[file]}

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        return (yield from self._record(collector.nodeid.partition("::")[0]))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        since = time.process_time()
        result = yield from self._record(item.nodeid)
        self.seconds[item.nodeid] = time.process_time() - since
        return result

    def _record(self, what: str) -> Any:
        before, self.now = self.now, what
        sys.settrace(self._enter)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            self.now = before

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        file = self.files.get(frame.f_code.co_filename)
        if file is None:
            return None
        lines = self.lines[self.now][file]

        def note(frame: FrameType, event: str, arg: object) -> Any:
            lines.add(frame.f_lineno)
            return note

        return note


def tests_for(mutant: Mutant, traces: Mapping[str, Trace]) -> tuple[list[str], list[str]]:
    """Those that run the statement that it changes, the fastest first: some from one file of tests, then the others.

    Most mutants do not get past the first file, and to import one takes less time than to import many.
    """

    def runs(trace: Trace) -> bool:
        return mutant.lines is None or not set(mutant.lines).isdisjoint(trace.lines.get(mutant.file, ()))

    found = sorted((test for test in traces if runs(traces[test])), key=lambda test: traces[test].seconds)
    by_file: dict[str, list[str]] = {}
    for test in found:
        by_file.setdefault(test.partition("::")[0], []).append(test)
    first = max((_until(FEW, tests, traces) for tests in by_file.values()), key=len, default=[])
    return first, _until(ENOUGH, [test for test in found if test not in first], traces)


def _until(seconds: float, tests: Sequence[str], traces: Mapping[str, Trace]) -> list[str]:
    before = accumulate((traces[test].seconds for test in tests), initial=0.0)
    return [test for test, spent in zip(tests, before, strict=False) if spent <= seconds]
