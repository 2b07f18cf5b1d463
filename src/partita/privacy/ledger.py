"""A site's privacy ledger: what private runs released about the same data, added up over runs, and a limit.

The file has one JSON object per line, chained by hashes (`storage.chained_lines`). The first line holds the limit.
Every other line is what one client released in one round of one run, and it is on disk before the client's reply
leaves. Someone who may write the file can forge it, or cut off its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from partita.core.client_rule import PrivacyRelease
from partita.core.dp_settings import PrivacyError
from partita.privacy.accountant import Accountant, epsilon_of_runs
from partita.storage.chained_lines import ChainedLines, Line

FORMAT = 1
CHAIN = ("line", "previous", "hash")  # what the chain adds to a line


class LedgerError(PrivacyError):
    """The ledger does not allow a run, or cannot be read."""


@dataclass(frozen=True)
class Limit:
    """What the ledger protects, and how much may be spent in all.

    Raises:
        LedgerError: If a value is impossible.
    """

    epsilon: float  # of all releases together
    delta: float  # at which epsilon is computed
    unit: Literal["example", "group"] = "example"  # whose presence is hidden
    group: str | None = None  # column of the groups

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < float("inf") or not 0 < self.delta < 1:
            raise LedgerError(
                f"the limit of a ledger is epsilon {self.epsilon} at delta {self.delta}; give an epsilon above 0, and "
                "a delta that is a probability, such as 1e-6"
            )
        if self.unit not in ("example", "group") or (self.unit == "group") != (self.group is not None):
            raise LedgerError("the unit of a ledger is 'example', or 'group' with the column of the groups")

    def __str__(self) -> str:
        return "example" if self.group is None else f"group ('{self.group}')"


@dataclass(frozen=True)
class Charge:
    """What one client releases in one round of a run."""

    run: str  # identity of the run: the same if it is resumed, another one if it is started again
    round: int
    client: str
    releases: tuple[PrivacyRelease, ...]
    experiment: str = ""  # digest of the config

    @property
    def key(self) -> tuple[str, int, str]:
        """What the noise of the releases depends on, so that the same key means the same release."""
        return self.run, self.round, self.client


@dataclass
class Ledger:
    """A ledger as its file says. Use `create` and `load`."""

    path: Path
    limit: Limit
    charges: dict[tuple[str, int, str], Charge] = field(default_factory=dict)
    last: Line = field(default_factory=dict)  # the last line of the file
    version: tuple[int, ...] = ()  # what the file was when it was last written or checked for repair

    @staticmethod
    def create(path: Path, limit: Limit) -> Ledger:
        """Write a new ledger that nothing is charged to.

        Raises:
            LedgerError: If the file exists.
        """
        if not path.parent.is_dir():
            raise LedgerError(f"there is no folder {path.parent} for the ledger {path.name}; create it")
        chain = _chain(path)
        with chain.locked():
            if path.exists():
                raise LedgerError(f"{path} exists already; a ledger is never replaced, so choose another file")
            chain.append(None, {"format": FORMAT, "limit": asdict(limit)})
        return Ledger.load(path)

    @staticmethod
    def load(path: Path) -> Ledger:
        """Read a ledger and check all its lines.

        Raises:
            LedgerError: If there is no such file, or if it is not as it was written.
        """
        if not path.exists():
            raise LedgerError(
                f"there is no ledger {path}; create it with 'partita budget --ledger {path} --new --epsilon 8 "
                "--delta 1e-6', and with --group COLUMN if it protects groups such as patients"
            )
        return _parse(path, _chain(path).read()[0])

    def spent(self, more: Iterable[Charge] = ()) -> float:
        """Return the epsilon of all charges, and of `more` if they were charged too.

        One example or group is at one client of a run, and may be at any client of another run. So a run costs as much
        as its most expensive client, and runs add up. If clients of a run released different things, the cost is
        Rényi's bound for the worst client at each order; otherwise it is exact.
        """
        return self._cost({**self.charges, **{charge.key: charge for charge in more}}.values(), "pld")

    def check(self, more: Sequence[Charge]) -> None:
        """Raise a LedgerError if charging `more` would exceed the limit, or contradicts what was charged before."""
        for charge in more:
            earlier = self.charges.get(charge.key, charge)
            if Counter(earlier.releases) != Counter(charge.releases):
                raise LedgerError(
                    f"{self.path} says that '{charge.client}' released something else in round {charge.round} of this "
                    "run; has the data or the config changed? Start a new run instead"
                )
        together = list({**self.charges, **{charge.key: charge for charge in more}}.values())
        # Rényi's bound takes no time and is never too low.
        if self._cost(together, "rdp") <= self.limit.epsilon:
            return
        cost = self._cost(together, "pld")
        if cost > self.limit.epsilon:
            raise LedgerError(
                f"the privacy ledger {self.path} allows epsilon {self.limit.epsilon:g} at delta {self.limit.delta:g}; "
                f"{self.spent():.4g} is spent, and with this run it would be {cost:.4g}: use more noise or fewer "
                "rounds, or ask those who set the limit"
            )

    def charge(self, *charges: Charge) -> None:
        """Add charges to the file, each once however often it is given. They are on disk when this returns.

        Raises:
            LedgerError: If the limit would be exceeded. Nothing is charged then.
        """
        chain = _chain(self.path)
        with chain.locked():
            self._refresh()
            new = {charge.key: charge for charge in charges if self.charges.get(charge.key) != charge}
            self.check(list(new.values()))
            if new:
                self.last = chain.append(self.last, *map(asdict, new.values()))[-1]
                self.charges |= new
                self.version = _version(self.path)

    def check_unit(self, unit: str, group: str | None) -> None:
        """Raise a LedgerError if a run with this privacy unit cannot be charged to this ledger."""
        if (unit, group) != (self.limit.unit, self.limit.group):
            mine = f"group ('{group}')" if group else unit
            raise LedgerError(
                f"{self.path} protects each {self.limit}, but the run protects each {mine}; epsilons of different "
                "units do not add up, so use a ledger for each unit"
            )

    def knows(self, run: str) -> bool:
        """Return whether something was charged for a run."""
        return any(charge.run == run for charge in self.charges.values())

    def about(self) -> dict[str, Any]:
        """Return the limit and what was spent, for JSON."""
        spent = self.spent()
        runs: dict[str, dict[str, Any]] = {}
        for charge in self.charges.values():
            run = runs.setdefault(charge.run, {"experiment": charge.experiment, "rounds": set(), "clients": set()})
            run["rounds"].add(charge.round)
            run["clients"].add(charge.client)
        counted = [
            {"run": name, "experiment": run["experiment"], **{key: len(run[key]) for key in ("rounds", "clients")}}
            for name, run in runs.items()
        ]
        return {"limit": asdict(self.limit), "spent": spent, "runs": counted}

    def to_text(self) -> str:
        """Format the limit and what was spent as lines of text."""
        about, limit = self.about(), self.limit
        lines = [f"{self.path}: epsilon {about['spent']:.4g} of {limit.epsilon:g} is spent at delta {limit.delta:g}"]
        lines.append(f"protected: each {limit}")
        if about["runs"]:
            lines += ["", "run               experiment        rounds  clients"]
            lines += [
                f"{run['run']:16}  {run['experiment']:16}  {run['rounds']:6}  {run['clients']:7}"
                for run in about["runs"]
            ]
        return "\n".join(lines)

    def _refresh(self) -> None:
        """Read the file again if another process wrote to it, and repair an append that was cut off."""
        if self.version and self.version == _version(self.path):
            return
        chain = _chain(self.path)
        lines, torn = chain.read()
        found = _parse(self.path, lines)
        if found.limit != self.limit or not self.charges.keys() <= found.charges.keys():
            raise LedgerError(f"{self.path} lost charges while it was used; restore it from a copy")
        if torn:
            chain.cut(torn)  # the process was killed while it wrote the line, so before the reply left
        self.charges, self.last, self.version = found.charges, found.last, _version(self.path)

    def _cost(self, charges: Iterable[Charge], by: Accountant) -> float:
        runs: dict[str, dict[str, Counter[PrivacyRelease]]] = {}
        for charge in charges:
            bill = runs.setdefault(charge.run, {}).setdefault(charge.client, Counter())
            for release in charge.releases:
                bill[replace(release, what="", count=1)] += release.count
        distinct = [
            list({frozenset(bill.items()): bill for bill in bills.values()}.values()) for bills in runs.values()
        ]
        return epsilon_of_runs(distinct, self.limit.delta, by)


def _chain(path: Path) -> ChainedLines:
    return ChainedLines(path, LedgerError)


def _version(path: Path) -> tuple[int, ...]:
    """Return numbers that change whenever another process writes the file."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _parse(path: Path, lines: Sequence[Line]) -> Ledger:
    if not lines:
        raise LedgerError(f"{path} has no complete line; restore it from a copy")
    contents = [{key: value for key, value in line.items() if key not in CHAIN} for line in lines]
    try:
        if contents[0]["format"] != FORMAT:
            raise ValueError(f"format {contents[0]['format']}")
        found = Ledger(path, Limit(**contents[0]["limit"]), last=lines[-1])
        for raw in contents[1:]:
            releases = tuple(PrivacyRelease(**release) for release in raw.pop("releases"))
            charge = Charge(**raw, releases=releases)
            found.charges[charge.key] = charge
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LedgerError(
            f"{path} is not a ledger that this version wrote ({error}); restore it from a copy"
        ) from error
    return found
