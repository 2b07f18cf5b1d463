"""The groups of a round, which every party computes from the roster: who shares masks and secrets with whom."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from partita.secure_aggregation.curve import agree_on
from partita.secure_aggregation.encoding import ProtocolError
from partita.secure_aggregation.messages import Advertisement
from partita.secure_aggregation.neighbors import (
    check_size,
    count_neighbors,
    group_threshold,
    neighborhoods,
    threshold_of,
)
from partita.secure_aggregation.round_setup import RoundSetup


@dataclass(frozen=True)
class Groups:
    """The clients of a round.

    Attributes:
        setup: The public facts of the round.
        roster: The advertisements by client.
        neighbors: The neighbors of each client, sorted.
        threshold: How many clients of a group, a client and its neighbors, must stay until the end.
        needed: How many clients of the round must.
    """

    setup: RoundSetup
    roster: Mapping[str, Advertisement]
    neighbors: Mapping[str, tuple[str, ...]]
    threshold: int
    needed: int

    def group(self, client: str) -> list[str]:
        """Return a client and its neighbors, sorted. The place in this list, from 1, is the position of a share."""
        return sorted((client, *self.neighbors[client]))


def find_groups(setup: RoundSetup, roster: Mapping[str, Advertisement], encoded: bytes) -> Groups:
    """Compute the groups of a round.

    The seed of the random graph is a digest of the roster, which holds fresh random keys of all clients, so no one can
    choose it.

    Args:
        setup: The public facts of the round.
        roster: The advertisements by client.
        encoded: The roster as bytes.

    Raises:
        TooFewClients: If there are too few clients for a round.
        ProtocolError: If there are more clients than the fixed-point format allows.
    """
    check_size(setup.settings, len(roster))
    if len(roster) > setup.fixed_point.clients:
        raise ProtocolError(
            f"the roster has {len(roster)} clients, but the sum has room for {setup.fixed_point.clients}; server and "
            "clients disagree on federation.cohort"
        )
    count = count_neighbors(setup.settings, len(roster))
    seed = hashlib.sha256(setup.context + encoded).digest()
    return Groups(
        setup,
        roster,
        neighborhoods(list(roster), count, seed),
        group_threshold(setup.settings, len(roster)),
        threshold_of(setup.settings, len(roster)),
    )


def pair_mask(setup: RoundSetup, secret: bytes, public: bytes) -> bytes:
    """Return the key of the mask that two clients share, from one's private key and the other's public key."""
    return agree_on(secret, public, setup.context, "mask of two clients")
