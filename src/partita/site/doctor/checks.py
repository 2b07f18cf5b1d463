"""What a check returns, and how checks run: in order, each only after those that it needs."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from partita.core.client import ClientError
from partita.data.errors import DataError
from partita.experiment.config import Config
from partita.experiment.experiment import Experiment
from partita.site.config import SiteConfig

Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """The result of one check.

    Attributes:
        status: "warning" if a run would work, but someone should look.
        sentence: What was found.
        remedy: What to do about it; "" if there is nothing to do, or if the sentence says it.
        quotes_data: Whether the sentence may quote a value of the data, so that it must stay at the site.
    """

    status: Status
    sentence: str
    remedy: str = ""
    quotes_data: bool = False


@dataclass(frozen=True)
class Finding:
    """The outcome of a check, with its name."""

    check: str
    outcome: Outcome

    def to_json(self) -> dict[str, str]:
        """Return the finding without values of the data, because JSON is made to be passed on."""
        sentence = self.outcome.sentence
        if self.outcome.quotes_data:
            sentence = "failed; the reason may quote data, so only the doctor without --json shows it"
        shown = {"check": self.check, "status": self.outcome.status, "sentence": sentence}
        return shown | ({"remedy": self.outcome.remedy} if self.outcome.remedy else {})


class Examined:
    """A site while it is examined. A check fills in what later checks need."""

    site: SiteConfig
    config: Config
    experiment: Experiment

    def __init__(self, path: Path) -> None:
        self.path = path  # site.toml, or its folder


@dataclass(frozen=True)
class Check:
    """A check of a site.

    Attributes:
        name: Its name, one word.
        needs: Names of the checks that must not have failed.
        work: Returns the outcome. An exception counts as a failure, with its text as the sentence.
    """

    name: str
    needs: tuple[str, ...]
    work: Callable[[Examined], Outcome]


def ok(sentence: str) -> Outcome:
    """Return the outcome of a check that found nothing wrong."""
    return Outcome("ok", sentence)


def failed(sentence: str, remedy: str) -> Outcome:
    """Return the outcome of a check that found something to mend."""
    return Outcome("failed", sentence, remedy)


def run_checks(checks: Iterable[Check], examined: Examined) -> Iterator[Finding]:
    """Run checks in order and yield each finding as soon as it is known. A check that needs a failed one is skipped."""
    broken: dict[str, str] = {}  # check without a result -> the failed check that is the reason
    for check in checks:
        cause = next((broken[name] for name in check.needs if name in broken), None)
        if cause is None:
            outcome = _outcome(check, examined)
        else:
            outcome = Outcome("skipped", f"not checked, because the check '{cause}' failed")
        if outcome.status in ("failed", "skipped"):
            broken[check.name] = cause or check.name
        yield Finding(check.name, outcome)


def _outcome(check: Check, examined: Examined) -> Outcome:
    try:
        # Paths in the experiment and in [set] are relative to the site's folder.
        with chdir(examined.site.folder) if hasattr(examined, "site") else nullcontext():
            return check.work(examined)
    except Exception as error:  # whatever is wrong at a site, the other checks still run
        if os.environ.get("PARTITA_DEBUG"):
            traceback.print_exception(error)
        return _of_error(error)


def _of_error(error: Exception) -> Outcome:
    """Return a failure that quotes the error if partita wrote its text, which ends with a remedy."""
    if isinstance(error, DataError):
        return Outcome("failed", str(error), quotes_data=True)
    if type(error).__module__.startswith("partita."):
        return Outcome("failed", error.reason if isinstance(error, ClientError) else str(error))
    return failed(
        f"{type(error).__name__}; its text is not shown, because it may quote data",
        "set PARTITA_DEBUG=1 to see the traceback on this terminal",
    )
