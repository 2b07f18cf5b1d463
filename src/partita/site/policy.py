"""A site's policy (`policy.toml`): what may leave it. What the policy does not allow is refused."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, time, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from partita.core.model import Model, role_tag
from partita.core.options import NotNegative, Positive, Range, format_value
from partita.core.tensors import Names
from partita.site.toml_tables import SiteError, load_table
from partita.storage import atomic_files

ANY = "*"
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
UNITS = ("none", "example", "group", "client")  # from the least protected to the most
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
Bytes = Annotated[int, Range(low=0)]
_CLOCK = re.compile(r"([01]\d|2[0-3]):([0-5]\d)|24:00")


@dataclass(frozen=True)
class LeaveTable:
    """The `[leave]` table: parameters and scores that may leave."""

    roles: Annotated[tuple[str, ...], "tags of parameters that may leave, as `partita plan` prints them; `*` for any"]
    names: Annotated[tuple[str, ...], "further parameters that may leave, by name; `*` stands for any text"] = ()
    never: Annotated[tuple[str, ...], "parameters that may not leave, whatever the rest says"] = ()
    scores: Annotated[bool, "whether scores on the site's own examples may leave"] = False

    def allows(self, name: str, tags: Names) -> bool:
        """Whether a parameter with these tags may leave."""
        if _matches(name, self.never):
            return False
        return ANY in self.roles or not tags.isdisjoint(self.roles) or _matches(name, self.names)

    def forbidden(self, names: Iterable[str], model: Model) -> list[str]:
        """Return the names that may not leave. A name that the model does not have may not either."""
        return sorted(name for name in names if name not in model.tags or not self.allows(name, _tags(model, name)))


@dataclass(frozen=True)
class LimitsTable:
    """The `[limits]` table. A limit that is left out does not apply."""

    bytes_per_round: Annotated[Bytes | None, "most bytes of tensors in one reply"] = None
    bytes_total: Annotated[Bytes | None, "most bytes of tensors in all replies of this site's log"] = None
    rounds: Annotated[Annotated[int, Range(low=1)] | None, "most rounds of an experiment"] = None


@dataclass(frozen=True)
class PrivacyTable:
    """The `[privacy]` table. Each key that is set refuses experiments without privacy."""

    unit: Annotated[
        Literal["none", "example", "group", "client"], "least unit that noise must hide; `none` requires no noise"
    ] = "none"
    max_epsilon: Annotated[Positive | None, "largest epsilon that all replies of this site's log may cost"] = None
    min_noise: Annotated[NotNegative | None, "least noise, in multiples of the clip"] = None

    @property
    def required(self) -> bool:
        """Whether an experiment must add noise at the site."""
        return self.unit != "none" or self.max_epsilon is not None or self.min_noise is not None


@dataclass(frozen=True)
class HoursTable:
    """The `[hours]` table: when jobs are answered, by the clock of the site's machine."""

    days: Annotated[tuple[Day, ...], "days on which the hours begin"] = DAYS  # type: ignore[assignment]
    from_: Annotated[str, "first minute, as `20:00`"] = "00:00"
    to: Annotated[str, "end, as `06:00`; an end before the start is on the next day"] = "24:00"

    def __post_init__(self) -> None:
        for key, value in (("from", self.from_), ("to", self.to)):
            if not _CLOCK.fullmatch(value) or (key == "from" and value == "24:00"):
                raise SiteError(f"{key} is {format_value(value)}; write hours and minutes, as '20:00'")
        if self.from_ == self.to:
            raise SiteError(f"to is {self.to!r}, as is from; for whole days, write from = '00:00' and to = '24:00'")
        if not self.days:
            raise SiteError("days is empty; list days such as 'mon', or leave it out for all")

    def open_at(self, now: datetime) -> bool:
        """Whether jobs are answered at this local time."""
        return any(
            DAYS[day.weekday()] in self.days and start <= now < end
            for day in (now, now - timedelta(days=1))
            for start, end in [self._window(day)]
        )

    def _window(self, day: datetime) -> tuple[datetime, datetime]:
        """Return the start and end of the hours that begin on a day."""
        midnight = datetime.combine(day.date(), time(), day.tzinfo)
        begin, end = _minutes(self.from_), _minutes(self.to)
        end += 24 * 60 if end <= begin else 0
        return midnight + timedelta(minutes=begin), midnight + timedelta(minutes=end)

    def __str__(self) -> str:
        return f"{self.from_} to {self.to}, beginning on {', '.join(self.days)}"


@dataclass(frozen=True)
class SecureAggregationTable:
    """The `[secure_aggregation]` table."""

    required: Annotated[bool, "refuse an experiment in which the server sees this site's update by itself"] = False
    min_clients: Annotated[Annotated[int, Range(low=2)], "least number of clients in a sum"] = 2


@dataclass(frozen=True)
class Policy:
    """What may leave a site."""

    leave: Annotated[LeaveTable, "parameters and scores that may leave"]
    experiments: Annotated[tuple[str, ...], "digests of approved experiments, as `partita site plan` prints them"] = ()
    code: Annotated[tuple[str, ...], "digests of approved own code that experiments name"] = ()
    limits: Annotated[LimitsTable, "most bytes and rounds"] = field(default_factory=LimitsTable)
    privacy: Annotated[PrivacyTable, "least protection by noise"] = field(default_factory=PrivacyTable)
    hours: Annotated[HoursTable, "when jobs are answered"] = field(default_factory=HoursTable)
    secure_aggregation: Annotated[SecureAggregationTable, "whether the server may see single updates"] = field(
        default_factory=SecureAggregationTable
    )


def load_policy(path: Path) -> Policy:
    """Read a site's policy.

    Raises:
        ConfigError: If the file cannot be read, or is not TOML.
        SiteError: If a key is unknown or missing, or a value is invalid. The message names file, key and remedy.
    """
    return load_table(path, Policy)


def policy_digest(path: Path) -> str:
    """Return the SHA-256 of the policy's file, which the site's log records."""
    return hashlib.sha256(atomic_files.read(path)).hexdigest()


def _tags(model: Model, name: str) -> Names:
    """Return a parameter's tags and its role, which `partita plan` prints as "–" if it has none."""
    return model.tags[name] | {role_tag(model.tags[name]) or "–"}


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _minutes(clock: str) -> int:
    hours, minutes = clock.split(":")
    return 60 * int(hours) + int(minutes)
