"""The server's side of the protocol: it collects the messages of each stage, and in the end it learns the sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

import torch

from partita.secure_aggregation.client import OWN_MASK
from partita.secure_aggregation.encoding import ProtocolError, TooFewClients
from partita.secure_aggregation.groups import Groups, find_groups, pair_mask
from partita.secure_aggregation.key_agreement import derive, public_key
from partita.secure_aggregation.masks import add_mask
from partita.secure_aggregation.messages import (
    Advertisement,
    Stayed,
    UnmaskedShares,
    commit,
    read_sealed,
    read_vector,
    write_roster,
    write_sealed,
    write_signatures,
)
from partita.secure_aggregation.round_setup import RoundSetup
from partita.secure_aggregation.secret_sharing import recover

Stage = Literal["advertise", "share_keys", "mask", "confirm", "unmask"]


class SecureServer:
    """The server in one round.

    `add_*` takes a client's message of a stage and raises ProtocolError if it is not acceptable; the client is then
    treated as one that dropped out. The first call of `roster`, `inbox`, `lists` or `signatures` ends the stage before
    it: later messages of that stage are refused.

    Attributes:
        setup: The public facts of the round.
        up: Bytes from clients by stage.
        down: Bytes to clients by stage.
    """

    def __init__(self, setup: RoundSetup) -> None:
        self.setup = setup
        self.up, self.down = Counter[Stage](), Counter[Stage]()
        self._advertised: dict[str, Advertisement] = {}
        self._roster = b""
        self._groups: Groups | None = None
        self._sealed: dict[str, dict[str, bytes]] = {}  # sender -> receiver -> sealed shares
        self._masked: list[str] = []
        self._total: torch.Tensor | None = None
        self._confirmed: dict[str, bytes] = {}
        self._unmasked: dict[str, UnmaskedShares] = {}
        self._closed: set[Stage] = set()

    @property
    def survivors(self) -> tuple[str, ...]:
        """The clients whose masked vector arrived: those of the sum."""
        return tuple(self._masked)

    @property
    def dropped(self) -> tuple[str, ...]:
        """The clients that shared keys, but whose vector did not arrive: their masks are recovered."""
        return tuple(sorted(self._sealed.keys() - set(self._masked)))

    @property
    def groups(self) -> Groups:
        """The groups of the round, after `roster`."""
        if self._groups is None:
            raise ProtocolError("the roster of the round has not been made yet")
        return self._groups

    def add_advertisement(self, client: str, data: bytes) -> None:
        """Add a client's public keys."""
        self._receive("advertise", client, data, client in self._advertised)
        found = Advertisement.from_bytes(data)
        if found.client != client:
            raise ProtocolError(f"{client} advertises keys in the name of {found.client}")
        keys = {key for each in self._advertised.values() for key in (each.cipher_key, each.mask_key)}
        if found.cipher_key == found.mask_key or keys & {found.cipher_key, found.mask_key}:
            raise ProtocolError(f"{client} advertises a key that is in use already")
        self._advertised[client] = found

    def roster(self) -> bytes:
        """Return the public keys of all clients, for each of them.

        Raises:
            TooFewClients: If there are too few clients for a round.
        """
        if "advertise" not in self._closed:
            self._closed.add("advertise")
            self._roster = write_roster(self._advertised)
            self._groups = find_groups(self.setup, self._advertised, self._roster)
        self.down["advertise"] += len(self._roster)
        return self._roster

    def add_shares(self, client: str, data: bytes) -> None:
        """Add a client's sealed shares for its neighbors."""
        self._receive("share_keys", client, data, client in self._sealed)
        sealed = read_sealed(data)
        if sealed.keys() != set(self._member(client)):
            raise ProtocolError(f"{client} sent shares for {len(sealed)} clients, which are not just its neighbors")
        self._sealed[client] = sealed

    def inbox(self, client: str) -> bytes:
        """Return the sealed shares for a client.

        Raises:
            TooFewClients: If too few clients shared their keys.
        """
        if "share_keys" not in self._closed:
            self._closed.add("share_keys")
            self._need_enough(self._sealed, "shared their keys")
        message = write_sealed(
            {peer: self._sealed[peer][client] for peer in self._member(client) if peer in self._sealed}
        )
        self.down["share_keys"] += len(message)
        return message

    def add_masked(self, client: str, data: bytes) -> None:
        """Add a client's masked vector to the sum."""
        self._receive("mask", client, data, client in self._masked)
        if client not in self._sealed:
            raise ProtocolError(f"{client} sent a vector without having shared its keys")
        vector = read_vector(data, self.setup.layout.length, self.setup.dtype)
        self._total = vector if self._total is None else self._total.add_(vector)  # wraps around
        self._masked.append(client)

    def lists(self) -> bytes:
        """Return who stayed so far, for each client whose vector arrived.

        Raises:
            TooFewClients: If the vectors of too few clients arrived.
        """
        if "mask" not in self._closed:
            self._closed.add("mask")
            self._need_enough(self._masked, "sent their vector")
        message = Stayed(frozenset(self._sealed), frozenset(self._masked)).to_bytes(self.groups.roster)
        self.down["mask"] += len(message)
        return message

    def add_confirmed(self, client: str, data: bytes) -> None:
        """Add a client's signature of the lists."""
        self._receive("confirm", client, data, client in self._confirmed)
        if client not in self._masked:
            raise ProtocolError(f"{client} confirmed a sum without having sent a vector")
        self._confirmed[client] = data

    def signatures(self) -> bytes:
        """Return all signatures of the lists, for each client that confirmed them.

        Raises:
            TooFewClients: If too few clients did.
        """
        if "confirm" not in self._closed:
            self._closed.add("confirm")
            self._need_enough(self._confirmed, "confirmed the sum")
        message = write_signatures(self._confirmed, self._masked)
        self.down["confirm"] += len(message)
        return message

    def add_unmasked(self, client: str, data: bytes) -> None:
        """Add a client's shares of the secrets of its group."""
        self._receive("unmask", client, data, client in self._unmasked)
        if client not in self._confirmed:
            raise ProtocolError(f"{client} sent shares without having confirmed the sum")
        self._unmasked[client] = UnmaskedShares.from_bytes(data)

    def sum(self) -> torch.Tensor:
        """Return the sum of the survivors' vectors: recover the masks that did not cancel, and take them off.

        Raises:
            TooFewClients: If too few clients unmasked.
            ProtocolError: If a secret cannot be recovered because of a wrong share.
        """
        self._closed.add("unmask")
        if self._total is None:
            raise TooFewClients("no client sent a vector")
        total, context = self._total.clone(memory_format=torch.contiguous_format), self.setup.context
        for client in self._masked:
            seed = self._recover(client, {name: each.seeds for name, each in self._unmasked.items()})
            if commit(seed, context) != self.groups.roster[client].commitment:
                raise ProtocolError(f"the shares of the seed of {client} do not give it; at least one share is wrong")
            add_mask(total, derive(seed, context, OWN_MASK), -1)
        for client in self.dropped:
            secret = self._recover(client, {name: each.keys for name, each in self._unmasked.items()})
            if public_key(secret) != self.groups.roster[client].mask_key:
                raise ProtocolError(f"the shares of the key of {client} do not give it; at least one share is wrong")
            for peer in self.groups.neighbors[client]:
                if peer in self._masked:
                    key = pair_mask(self.setup, secret, self.groups.roster[peer].mask_key)
                    add_mask(total, key, -1 if peer < client else 1)
        return total

    def _recover(self, client: str, shares: Mapping[str, Mapping[str, bytes]]) -> bytes:
        group = self.groups.group(client)
        found = {place: shares[peer][client] for place, peer in enumerate(group, 1) if client in shares.get(peer, {})}
        if len(found) < self.groups.threshold:
            raise TooFewClients(
                f"{len(found)} clients sent a share of the secret of {client}, and the threshold is "
                f"{self.groups.threshold} of {len(group)}; lower secure_aggregation.threshold, or have fewer dropouts"
            )
        return recover(found, self.groups.threshold)

    def _member(self, client: str) -> tuple[str, ...]:
        if client not in self.groups.neighbors:
            raise ProtocolError(f"{client} is not in the roster of the round")
        return self.groups.neighbors[client]

    def _need_enough(self, clients: Mapping[str, object] | list[str], what: str) -> None:
        """Stop early if a group or the round is too small: secrets would be lost, or the clients would refuse."""
        there = set(clients)
        for client in sorted(there):
            group = self.groups.group(client)
            if (count := len(there.intersection(group))) < self.groups.threshold:
                raise TooFewClients(
                    f"{len(there)} of {len(self.groups.roster)} clients {what}, which leaves {count} of {len(group)} "
                    f"in the group of {client}, and the threshold is {self.groups.threshold}; lower "
                    "secure_aggregation.threshold, or have fewer dropouts"
                )
        if len(there) < self.groups.needed:
            raise TooFewClients(
                f"{len(there)} of {len(self.groups.roster)} clients {what}, and the threshold is {self.groups.needed}; "
                "lower secure_aggregation.threshold, or have fewer dropouts"
            )

    def _receive(self, stage: Stage, client: str, data: bytes, again: bool) -> None:
        self.up[stage] += len(data)
        if stage in self._closed:
            raise ProtocolError(f"{client} answered the stage '{stage}' after its end")
        if again:
            raise ProtocolError(f"{client} answered the stage '{stage}' twice")
