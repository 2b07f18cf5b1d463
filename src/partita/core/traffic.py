"""The bytes of a round, counted by parameter name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from partita.core import serialization
from partita.core.client import Job
from partita.core.tensors import Names, select
from partita.core.update import Update


@dataclass
class Traffic:
    """The bytes of a round by parameter name, summed over clients.

    Attributes:
        up: Bytes from clients to the server.
        down: Bytes from the server to clients.
    """

    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)


class TrafficMeter:
    """Counts the messages of one round.

    Most jobs of a round differ only in which parameters the client lacks, so the byte counts of a job without
    client-specific tensors are cached by those names. `total` then counts each distinct message once.
    """

    def __init__(self) -> None:
        self._up: list[Mapping[str, int]] = []  # bytes by name, for each message
        self._down: list[Mapping[str, int]] = []
        self._common: dict[Names, Mapping[str, int]] = {}

    def add_job(self, job: Job, common: bool) -> None:
        """Count a job.

        Args:
            job: The job.
            common: Whether all its tensors are the server's own, so that they depend on `job.stale` only.
        """
        counts = self._common.get(job.stale) if common else None
        if counts is None:
            counts = serialization.byte_counts({"params": select(job.params, job.stale), **job.slots})
            if common:
                self._common[job.stale] = counts
        self._down.append(counts)

    def add_update(self, update: Update) -> None:
        """Count an update."""
        self._up.append(serialization.byte_counts({"delta": update.delta, **update.slots}))

    def add_secure(self, up: Mapping[str, int], down: int) -> None:
        """Count the messages of secure aggregation, besides the jobs.

        Args:
            up: Bytes from clients by parameter name.
            down: Bytes to clients.
        """
        self._up.append(up)
        self._down.append({serialization.HEADER: down})

    def total(self) -> Traffic:
        """Return the bytes of all messages so far."""
        return Traffic(serialization.total_bytes(self._up), serialization.total_bytes(self._down))
