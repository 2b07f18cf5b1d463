"""Which cases of a test are fast, and what `make test` says when the fast tests get slow."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

TEST_SECONDS = 1.0  # set-up and call of one fast test
TIER_SECONDS = 180.0  # all fast tests, on two workers
WORKERS = 2
TOLERANCE = 1.25  # machines differ
SHOWN = 20


def spread(count: int, wanted: int) -> set[int]:
    """Return `wanted` places among `count`, evenly spread: the first, the last, and others between them."""
    if wanted >= count:
        return set(range(count))
    return {place * (count - 1) // max(wanted - 1, 1) for place in range(wanted)}


def mark_other_cases_slow(items: Sequence[pytest.Item], arguments: Sequence[str]) -> None:
    """Mark the cases slow that a `fast_cases` mark leaves out.

    Args:
        items: All collected tests.
        arguments: What pytest was asked to run.

    Raises:
        pytest.UsageError: If a mark names a case that the test does not have.
    """
    functions: dict[tuple[object, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("fast_cases"):
            functions.setdefault((item.parent, item.originalname), []).append(item)
    for cases in functions.values():
        mark = cases[0].get_closest_marker("fast_cases")
        assert mark is not None
        open_cases = [case for case in cases if not case.get_closest_marker("slow")]
        if isinstance(mark.args[0], int):
            fast = {open_cases[place].name for place in spread(len(open_cases), mark.args[0])}
        else:
            fast = {f"{cases[0].originalname}[{name}]" for name in mark.args}
            unknown = fast - {case.name for case in cases}
            if unknown and not any("[" in each for each in arguments):
                raise pytest.UsageError(f"fast_cases of {cases[0].nodeid} names no case: {', '.join(sorted(unknown))}")
        for case in open_cases:
            if case.name not in fast:
                case.add_marker(pytest.mark.slow)


def over_budget(seconds: dict[str, float], wall: float, workers: int) -> list[str]:
    """Return what to say of fast tests that took too long; nothing if none did.

    Args:
        seconds: Set-up and call of each test.
        wall: Seconds from the start to the end.
        workers: Processes that ran the tests.
    """
    slow = sorted(((took, name) for name, took in seconds.items() if took > TEST_SECONDS), reverse=True)
    lines = [f"{took:6.1f} s  {name}" for took, name in slow[:SHOWN]]
    if slow:
        lines.insert(0, f"{len(slow)} tests took more than {TEST_SECONDS:g} s: make them cheaper, or mark them slow.")
    if len(slow) > SHOWN:
        lines.append(f"and {len(slow) - SHOWN} more")
    if wall * workers > TIER_SECONDS * WORKERS * TOLERANCE:
        lines.append(
            f"They took {wall:.0f} s on {workers} worker(s). The budget is {TIER_SECONDS:g} s on {WORKERS}: mark the "
            "longest slow."
        )
    return lines


class Budget:
    """Measures the fast tests, and says at the end which are over their budget."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        if config.getoption("markexpr") != "not slow":
            return
        seconds: dict[str, float] = {}
        for reports in terminalreporter.stats.values():
            for report in reports:
                if isinstance(report, pytest.TestReport) and report.when != "teardown":
                    seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
        workers = config.getoption("numprocesses", None) or 1
        if lines := over_budget(seconds, time.monotonic() - self.start, workers):
            terminalreporter.section("fast tests over their budget")
            for line in lines:
                terminalreporter.write_line(line)
