"""Simulated clients that drop out or straggle, by rate and by trace."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from partita.core.rng import Key


class TraceError(ValueError):
    """A trace of client availability that cannot be read."""


@dataclass(frozen=True)
class Availability:
    """How much of its round's work a client gets through: 1 is all, 0 is a client that never answers.

    A trace says so for single rounds and clients; elsewhere, a client drops out with probability `dropout`, and
    otherwise straggles with probability `straggle`, getting through a uniformly drawn share of its steps.
    """

    client_dropout: float = 0.0
    straggler_rate: float = 0.0
    trace: Mapping[tuple[int, str], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rate in ("client_dropout", "straggler_rate"):
            if not 0 <= getattr(self, rate) <= 1:
                raise ValueError(f"federation.{rate} is {getattr(self, rate)}; it is a probability, from 0 to 1")

    def completed_fraction(self, key: Key, round: int, client: str) -> float:
        if (round, client) in self.trace:
            return self.trace[round, client]
        if not self.client_dropout and not self.straggler_rate:
            return 1.0
        draw = key / "round" / round / "client" / client / "faults"
        if (draw / "dropout").uniform() < self.client_dropout:
            return 0.0
        return (draw / "work").uniform() if (draw / "straggle").uniform() < self.straggler_rate else 1.0


def read_trace(path: Path) -> dict[tuple[int, str], float]:
    """A CSV file with the columns round, client, work."""
    trace: dict[tuple[int, str], float] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if lacking := [name for name in ("round", "client", "work") if name not in (rows.fieldnames or ())]:
                raise TraceError(f"{path} has no column '{lacking[0]}'; its first line must be 'round,client,work'")
            for line, row in enumerate(rows, start=2):
                try:
                    round, client, fraction = int(row["round"]), row["client"].strip(), float(row["work"])
                except (AttributeError, TypeError, ValueError) as error:
                    raise TraceError(f"{path}, line {line}: needs round, client, work, as in '3,c7,0.5'") from error
                if not 0 <= fraction <= 1:
                    raise TraceError(f"{path}, line {line}: work is {fraction}; it is a share, from 0 (drops out) to 1")
                trace[round, client] = fraction
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from error
    except csv.Error as error:
        raise TraceError(f"cannot read the trace {path}: {error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"cannot read the trace {path}: it is not text in UTF-8") from error
    return trace
