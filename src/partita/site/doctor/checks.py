"""What a check returns, and how checks run: in order, each only after those that it needs."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from partita.core.client import ClientError
from partita.data import Federation
from partita.data.errors import DataError
from partita.experiment.config import Config
from partita.experiment.experiment import Experiment
from partita.site.config import SiteConfig

PACKAGE = Path(__file__).parents[2]  # partita
Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """The result of one check.

    Attributes:
        status: "warning" if a run would work, but someone should look.
        sentence: What was found.
        remedy: What to do about it; "" if there is nothing to do.
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


@dataclass
class Examined:
    """A site while it is examined. A check fills in what later checks need."""

    path: Path  # site.toml, or its folder
    found_site: SiteConfig | None = None
    found_config: Config | None = None
    found_federation: Federation | None = None
    found_experiment: Experiment | None = None

    @property
    def site(self) -> SiteConfig:
        assert self.found_site is not None
        return self.found_site

    @property
    def config(self) -> Config:
        assert self.found_config is not None
        return self.found_config

    @property
    def federation(self) -> Federation:
        assert self.found_federation is not None
        return self.found_federation

    @property
    def experiment(self) -> Experiment:
        assert self.found_experiment is not None
        return self.found_experiment


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


def warning(sentence: str, remedy: str) -> Outcome:
    """Return the outcome of a check that found something to look at."""
    return Outcome("warning", sentence, remedy)


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
    site = examined.found_site
    try:
        # Paths in the experiment and in [set] are relative to the site's folder.
        with nullcontext() if site is None else chdir(site.folder):
            return check.work(examined)
    except Exception as error:  # whatever is wrong at a site, the other checks still run
        if os.environ.get("PARTITA_DEBUG"):
            traceback.print_exception(error)
        return of_error(error)


def of_error(error: Exception) -> Outcome:
    """Return a failure that quotes the error if partita wrote its text, which ends with a remedy."""
    if isinstance(error, DataError):
        return Outcome("failed", str(error), quotes_data=True)
    if type(error).__module__.startswith("partita."):
        return Outcome("failed", error.reason if isinstance(error, ClientError) else str(error))
    return failed(
        f"{type(error).__name__} in {_place(error)}; its text is not shown, because it may quote data",
        "set PARTITA_DEBUG=1 to see the traceback on this terminal",
    )


def _place(error: Exception) -> str:
    """Return the innermost line of partita that the error passed through."""
    frames: list[Any] = [
        frame for frame in traceback.extract_tb(error.__traceback__) if PACKAGE in Path(frame.filename).parents
    ]
    if not frames:
        return "another package"
    return f"{Path(frames[-1].filename).relative_to(PACKAGE.parent)}, line {frames[-1].lineno}"
