"""Split for deployments: the data stays at its client, and no machine sees the rows of more than one client."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from partita.core.options import closest_match
from partita.core.rng import Key
from partita.data.client_ids import NamedClients
from partita.data.errors import DataError
from partita.data.partition import Partition
from partita.data.task import Task


def site(
    task: Task,
    key: Key,
    sites: Annotated[tuple[str, ...], "names of all sites"],
    client: Annotated[str | None, "the site whose data is on this machine"] = None,
) -> Partition:
    """Assign all local rows to `client`; the other sites hold theirs. Without `client`, no rows are local.

    Raises:
        DataError: If `sites` is empty, names a site twice, or does not contain `client`.
    """
    names = NamedClients(sites)
    if not sites:
        raise DataError("split.sites is empty; list all participating sites, for example sites = ['north', 'south']")
    if client is not None and client not in names:
        raise DataError(f"split.client is '{client}', which is not in split.sites; {closest_match(client, sites)}")
    rows = np.arange(0 if client is None else task.row_count)
    sizes = [len(rows) if name == client else 0 for name in sites]
    return Partition(rows, np.concatenate([[0], np.cumsum(sizes)]), names)
