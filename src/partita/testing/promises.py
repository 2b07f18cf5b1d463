"""Promises: requirements with a name, and the outcome of testing each."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

from partita.core.options import OptionError

T = TypeVar("T")
Verdict = Literal["yes", "no", "not applicable", "not tested"]


class ConformanceError(AssertionError):
    """A promise is broken."""


class NotApplicable(Exception):
    """A promise has nothing to say here. The text gives the reason."""


class NotTested(Exception):
    """A promise cannot be tested. The text gives the reason."""


@dataclass(frozen=True)
class Promise(Generic[T]):
    """A requirement.

    Attributes:
        name: A short name.
        text: The requirement in one sentence.
        test: Raises ConformanceError if the promise is broken, NotApplicable or NotTested if it cannot say.
        needs: Names of earlier promises. If one of them is broken, the test would say nothing.
    """

    name: str
    text: str
    test: Callable[[T], None]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What testing one promise gave.

    Attributes:
        name: The promise's name.
        text: The promise in one sentence.
        verdict: Whether it is kept.
        reason: Why not, or why it was not tested; empty if it is kept.
    """

    name: str
    text: str
    verdict: Verdict
    reason: str = ""


def check_all(promises: Sequence[Promise[T]], subject: T) -> Iterator[Outcome]:
    """Test every promise in order. A broken one does not stop the others, except those that need it.

    Raises:
        OptionError: If an option of the tested code is invalid.
    """
    unmet: set[str] = set()
    for promise in promises:
        verdict, reason = _check(promise, subject, unmet)
        if verdict in ("no", "not tested"):
            unmet.add(promise.name)
        yield Outcome(promise.name, promise.text, verdict, reason)


def raise_first(promises: Sequence[Promise[T]], subject: T) -> None:
    """Test every promise in order.

    Raises:
        ConformanceError: If a promise is broken. Any other error of the tested code is raised as it is.
    """
    for promise in promises:
        try:
            promise.test(subject)
        except (NotApplicable, NotTested):
            continue


def require(kept: bool, broken: str) -> None:
    """Raise ConformanceError with the text `broken` unless `kept`."""
    if not kept:
        raise ConformanceError(broken)


def _check(promise: Promise[T], subject: T, unmet: set[str]) -> tuple[Verdict, str]:
    for need in promise.needs:
        if need in unmet:
            return "not tested", f"this needs '{need}'"
    try:
        promise.test(subject)
    except NotApplicable as reason:
        return "not applicable", str(reason)
    except NotTested as reason:
        return "not tested", str(reason)
    except ConformanceError as broken:
        return "no", str(broken)
    except OptionError:  # a wrong option says nothing about the code
        raise
    except Exception as error:  # own code can fail in any way, and the other promises are still of interest
        return "no", describe_error(error)
    return "yes", ""


def describe_error(error: Exception) -> str:
    """Return the error on one line, with the last line of own code that was running."""
    package = Path(__file__).parents[1]
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if package not in Path(frame.filename).parents and "site-packages" not in frame.filename
    ]
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
