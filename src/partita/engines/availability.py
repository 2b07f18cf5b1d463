"""Simulated dropouts and stragglers, by rate or by trace, and client sampling by trace."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from partita.core.options import OptionError
from partita.core.rng import Key
from partita.core.sampling import ClientInfo, EqualWeights, Uniform


class TraceError(ValueError):
    """The availability trace cannot be read."""


@dataclass(frozen=True)
class Availability:
    """Model of client availability: the fraction of its local steps that a client completes in a round.

    The trace sets the fraction for single rounds and clients. Otherwise, a client drops out with probability
    `client_dropout`; if it does not, it straggles with probability `straggler_rate` and completes a uniformly drawn
    fraction of its steps.

    Raises:
        ValueError: If a probability is not from 0 to 1.
    """

    client_dropout: float = 0.0
    straggler_rate: float = 0.0
    trace: Mapping[tuple[int, str], float] = field(default_factory=dict)  # (round, client) -> fraction

    def __post_init__(self) -> None:
        for rate in ("client_dropout", "straggler_rate"):
            if not 0 <= getattr(self, rate) <= 1:
                raise ValueError(f"federation.{rate} is {getattr(self, rate)}; it must be a probability from 0 to 1")

    def completed_fraction(self, key: Key, round: int, client: str) -> float:
        """Return the fraction of its steps that the client completes: 1 is all, 0 means that it does not answer."""
        if (round, client) in self.trace:
            return self.trace[round, client]
        if not self.client_dropout and not self.straggler_rate:
            return 1.0
        draw = key / "round" / round / "client" / client / "faults"
        if (draw / "dropout").uniform() < self.client_dropout:
            return 0.0
        return (draw / "work").uniform() if (draw / "straggle").uniform() < self.straggler_rate else 1.0


def read_trace(path: Path) -> dict[tuple[int, str], float]:
    """Read a CSV file with the columns round, client, work.

    Returns:
        (round, client) -> completed fraction.

    Raises:
        TraceError: If the file cannot be read or has an invalid row.
    """
    trace: dict[tuple[int, str], float] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if missing := [name for name in ("round", "client", "work") if name not in (rows.fieldnames or ())]:
                raise TraceError(f"{path} has no column '{missing[0]}'; its first line must be 'round,client,work'")
            for line, row in enumerate(rows, start=2):
                try:
                    round, client, fraction = int(row["round"]), row["client"].strip(), float(row["work"])
                except (AttributeError, TypeError, ValueError) as error:
                    raise TraceError(f"{path}, line {line}: needs round, client, work, as in '3,c7,0.5'") from error
                if not 0 <= fraction <= 1:
                    raise TraceError(
                        f"{path}, line {line}: work is {fraction}; it must be a fraction from 0 (drops out) to 1"
                    )
                trace[round, client] = fraction
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from error
    except csv.Error as error:
        raise TraceError(f"cannot read the trace {path}: {error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"cannot read the trace {path}: it is not text in UTF-8") from error
    return trace


@dataclass(frozen=True)
class Available(Uniform):
    """Client sampling among those that are available in the round. If they are too few, all of them are asked."""

    path: str = ""  # of the trace, for errors
    trace: Mapping[tuple[int, str], float] = field(default_factory=dict, repr=False)  # (round, client) -> fraction
    name: ClassVar[str] = "available"

    def check(self, rounds: int, clients: Sequence[str], size: int, at_least: int, info: ClientInfo) -> None:
        known = set(clients)
        present = Counter(round for (round, client), work in self.trace.items() if work and client in known)
        for round in range(rounds):
            if present[round] < max(1, at_least):
                raise OptionError(
                    f"{self.path} has {present[round]} available clients in round {round}, and a round needs "
                    f"{max(1, at_least)}; add rows 'round,client,work' with work above 0, or run fewer rounds"
                )

    def draw(self, key: Key, round: int, clients: Sequence[str], size: int, info: ClientInfo) -> list[str]:
        present = [client for client in clients if self.trace.get((round, client))]
        if not present:  # a client of the trace may not be connected
            raise OptionError(
                f"{self.path} has none of the {len(clients)} connected clients as available in round {round}"
            )
        return key.sample(present, min(size, len(present)))


def available(
    trace: Annotated[str, "CSV file with columns round, client, work; a client is available if work is above 0"],
    equal_weights: EqualWeights = False,
) -> Available:
    """Uniform among the clients that a trace has as available in the round; all of them if they are too few."""
    return Available(equal_weights, trace, read_trace(Path(trace)))
