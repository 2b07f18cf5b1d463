"""Tracks which client holds which version of which parameter, so that only missing versions are sent."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import compress

from partita.core.tensors import Names

NEVER = -1


@dataclass(frozen=True)
class ParameterVersions:
    """The current version of each parameter, and the versions that each client holds.

    A version is the number of completed rounds when the value was created: 0 is the initial model.

    Attributes:
        current: The current version by name.
        held: For each client that ever answered, the version of each name, in the order of `current`. Clients with
            equal versions share one tuple, so the size grows with the clients that took part, not with the population.
        clients_have_initial_model: Whether clients hold the initial model before the first round.
    """

    current: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    clients_have_initial_model: bool = False

    def missing(self, client: str, names: Names) -> Names:
        """Return the names whose current version the client does not hold."""
        return names.intersection(compress(self.current, map(operator.ne, self.current.values(), self._row(client))))

    def acknowledge(self, received: Iterable[tuple[str, Names]]) -> ParameterVersions:
        """Record that clients hold the current version of names.

        Pass only clients that answered: a client that did not answer may not have received anything.
        """
        held, shared = dict(self.held), dict[tuple[int, ...], tuple[int, ...]]()
        known: dict[tuple[Names, tuple[int, ...]], tuple[int, ...]] = {}
        for client, names in received:
            before = names, self._row(client)
            if before not in known:
                rows = zip(self.current.items(), before[1], strict=True)
                row = tuple(version if name in names else has for (name, version), has in rows)
                known[before] = shared.setdefault(row, row)
            held[client] = known[before]
        return ParameterVersions(self.current, held, self.clients_have_initial_model)

    def forget(self, overwritten: Iterable[tuple[str, Names]]) -> ParameterVersions:
        """Record that clients received other values for names, so that they no longer hold the server's version."""
        held = dict(self.held)
        for client, names in overwritten:
            rows = zip(self.current, self._row(client), strict=True)
            held[client] = tuple(NEVER if name in names else has for name, has in rows)
        return ParameterVersions(self.current, held, self.clients_have_initial_model)

    def changed(self, names: Names, version: int) -> ParameterVersions:
        """Set the current version of names that changed."""
        versions = {name: version if name in names else old for name, old in self.current.items()}
        return ParameterVersions(versions, self.held, self.clients_have_initial_model)

    def _row(self, client: str) -> tuple[int, ...]:
        return self.held.get(client) or (0 if self.clients_have_initial_model else NEVER,) * len(self.current)
