"""Who holds which version of which parameter, so that a client is sent only what it lacks."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import compress

from partita.core.tensors import Names

NEVER = -1


@dataclass(frozen=True)
class ParameterVersions:
    """A version is the number of rounds completed when the value was made: 0 is the initial model.

    `held` has one row of versions for each client that ever answered, in the order of `versions`. Clients that were
    in step share one tuple, so the ledger grows with those who took part and not with the population.
    """

    current: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    clients_have_initial_model: bool = False  # clients hold the initial model before the first round

    def missing(self, client: str, names: Names) -> Names:
        """The names whose present version the client does not hold."""
        return names.intersection(compress(self.current, map(operator.ne, self.current.values(), self._row(client))))

    def acknowledge(self, received: Iterable[tuple[str, Names]]) -> ParameterVersions:
        """These clients answered, so they hold the present version of these names. Silence proves nothing."""
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
        """These clients were sent something else under these names, so they no longer hold the server's."""
        held = dict(self.held)
        for client, names in overwritten:
            rows = zip(self.current, self._row(client), strict=True)
            held[client] = tuple(NEVER if name in names else has for name, has in rows)
        return ParameterVersions(self.current, held, self.clients_have_initial_model)

    def changed(self, names: Names, version: int) -> ParameterVersions:
        versions = {name: version if name in names else old for name, old in self.current.items()}
        return ParameterVersions(versions, self.held, self.clients_have_initial_model)

    def _row(self, client: str) -> tuple[int, ...]:
        return self.held.get(client) or (0 if self.clients_have_initial_model else NEVER,) * len(self.current)
