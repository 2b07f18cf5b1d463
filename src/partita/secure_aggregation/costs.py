"""The bytes of a round for one client, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from partita.core import serialization
from partita.secure_aggregation.curve import NUMBER_BYTES, POINT_BYTES
from partita.secure_aggregation.dealing import HASH_BYTES, KINDS, VALUES_BYTES
from partita.secure_aggregation.encoding import LENGTH_BYTES
from partita.secure_aggregation.key_agreement import KEY_BYTES, NONCE_BYTES, TAG_BYTES
from partita.secure_aggregation.messages import VECTOR
from partita.secure_aggregation.neighbors import count_neighbors, group_threshold
from partita.secure_aggregation.round_setup import RoundSetup

START = 2  # the kind and the version of a message


@dataclass(frozen=True)
class ClientCosts:
    """What one client sends and receives in a round without dropouts and signed keys, besides its job.

    Attributes:
        vector: Bytes of the numbers in the masked vector.
        up: All other bytes that it sends: keys, shares, headers.
        down: All bytes that it receives.
    """

    vector: int
    up: int
    down: int


def client_costs(setup: RoundSetup, clients: Sequence[str], client: str) -> ClientCosts:
    """Return the costs of a client. In a sparse graph, its neighbors are taken to have the first names of the round.

    Args:
        setup: The setup of the round.
        clients: The cohort.
        client: The client, which may be outside of the cohort.
    """
    others = [name for name in clients if name != client]
    near = others[: count_neighbors(setup.settings, len(clients))]

    def message(names: Sequence[str], *fields: int) -> int:
        """The bytes of a message with a record of a name and fields for each client."""
        per_name = sum(fields) + (1 + len(fields)) * LENGTH_BYTES
        return START + sum(len(name.encode()) + per_name for name in names)

    keys, hashes = (KEY_BYTES, POINT_BYTES, POINT_BYTES, 0), len(KINDS) * HASH_BYTES
    sealed = NONCE_BYTES + VALUES_BYTES + TAG_BYTES
    proof = 2 * LENGTH_BYTES + POINT_BYTES + group_threshold(setup.settings, len(clients)) * NUMBER_BYTES
    dealing = message([client, *near], hashes, sealed) - sealed + proof  # none is sealed for itself
    inbox, report = message(near, hashes, HASH_BYTES, NUMBER_BYTES, sealed), START + LENGTH_BYTES
    lists, signatures = START + LENGTH_BYTES + len(others) + 1, START + LENGTH_BYTES * (len(others) + 1)
    empty = serialization.save({VECTOR: torch.empty(0, dtype=setup.dtype)})
    digits = len(str(setup.layout.length)) + len(str(setup.layout.length * setup.dtype.itemsize)) - 2
    header = 8 + -(-(len(empty.rstrip(b" ")) - 8 + digits) // 8) * 8
    return ClientCosts(
        vector=setup.layout.length * setup.dtype.itemsize,
        up=message([client], *keys) + dealing + report + header + message([client, *near], 1, NUMBER_BYTES),
        down=message([client, *others], *keys) + inbox + 2 * lists + signatures,
    )
