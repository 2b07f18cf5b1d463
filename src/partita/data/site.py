"""Data that lives where its client does: no machine sees more than one client's rows."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from partita.core.options import closest_match
from partita.core.rng import Key
from partita.data.client_ids import NamedClients
from partita.data.errors import DataError
from partita.data.task import Partition, Task


def site(
    task: Task,
    key: Key,
    sites: Annotated[tuple[str, ...], "names of all sites"],
    client: Annotated[str | None, "the site whose data is here"] = None,
) -> Partition:
    """All rows belong to one client, and those of the other sites are elsewhere; without a client, all of them are."""
    names = NamedClients(sites)
    if not sites:
        raise DataError("split.sites names no site; list all that take part, as in sites = ['north', 'south']")
    if client is not None and client not in names:
        raise DataError(f"split.client is '{client}', which is not in split.sites; {closest_match(client, sites)}")
    rows = np.arange(0 if client is None else len(task.train))
    sizes = [len(rows) if name == client else 0 for name in sites]
    return Partition(rows, np.concatenate([[0], np.cumsum(sizes)]), names)
