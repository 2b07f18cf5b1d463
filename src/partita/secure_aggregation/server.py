"""The server's side of the protocol: it collects the messages of each stage, and in the end it learns the sum."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Literal

import torch

from partita.secure_aggregation.client import OWN_MASK
from partita.secure_aggregation.curve import check_point, public_point
from partita.secure_aggregation.dealing import HASH_BYTES, KINDS, Dealing, hash_of
from partita.secure_aggregation.encoding import ProtocolError, TooFewClients
from partita.secure_aggregation.groups import Groups, find_groups, pair_mask
from partita.secure_aggregation.key_agreement import agree, derive, new_secret
from partita.secure_aggregation.masks import add_mask
from partita.secure_aggregation.messages import (
    KEY,
    SEED,
    Advertisement,
    Parcel,
    Report,
    Stayed,
    UnmaskedShares,
    Verify,
    read_vector,
    write_inbox,
    write_roster,
    write_signatures,
)
from partita.secure_aggregation.neighbors import colluding_clients
from partita.secure_aggregation.round_setup import RoundSetup
from partita.secure_aggregation.secret_sharing import recover

Stage = Literal["advertise", "share_keys", "check", "mask", "confirm", "unmask"]


class SecureServer:
    """The server in one round.

    `add_*` takes a client's message of a stage and raises ProtocolError if it is not acceptable; the client is then
    treated as one that dropped out. The first call of `roster`, `inbox`, `present`, `lists` or `signatures` ends the
    stage before it: later messages of that stage are refused.

    Args:
        setup: The public facts of the round.
        verify: Checks a signature of a client; None without signatures. One client with a wrong signature would make
            all others refuse the roster, so the server looks first.

    Attributes:
        setup: The public facts of the round.
        expelled: By client that shared its keys and was left out all the same, the reason.
        disputes: By pair of clients, of which one is wrong and it is unknown which, what the first says of the second.
        up: Bytes from clients by stage.
        down: Bytes to clients by stage.
    """

    def __init__(self, setup: RoundSetup, verify: Verify | None = None) -> None:
        self.setup, self.verify = setup, verify
        self.expelled: dict[str, str] = {}
        self.disputes: dict[tuple[str, str], str] = {}
        self.up, self.down = Counter[Stage](), Counter[Stage]()
        self._advertised: dict[str, Advertisement] = {}
        self._roster = b""
        self._groups: Groups | None = None
        self._dealt: dict[str, Dealing] = {}
        self._challenges: dict[str, bytes] = {}
        self._reports: dict[str, frozenset[str]] = {}
        self._shared: frozenset[str] = frozenset()
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
        return tuple(sorted(self._shared.difference(self._masked)))

    @property
    def shared(self) -> frozenset[str]:
        """The clients with which others share masks, after `present`."""
        return self._shared

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
        agree(new_secret(), found.cipher_key, self.setup.context, "a test")
        for point in (found.mask_key, found.commitment):
            check_point(point)
        self._check_signature(client, found.signed_part(self.setup.context), found.signature)
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
        """Add a client's sealed shares for its neighbors, and check that they are of the secrets in the roster."""
        self._receive("share_keys", client, data, client in self._dealt)
        self._member(client)
        dealing = Dealing.from_bytes(data, self.groups.group(client), self.groups.threshold)
        known = self.groups.roster[client]
        if not dealing.proves(client, self._about, known.commitment, known.mask_key):
            raise ProtocolError(f"{client} shares other secrets than those of its public keys")
        self._dealt[client], self._challenges[client] = dealing, dealing.challenge(client, self._about)

    def inbox(self, client: str) -> bytes:
        """Return the sealed shares for a client.

        Raises:
            TooFewClients: If too few clients shared their keys.
        """
        if "share_keys" not in self._closed:
            self._closed.add("share_keys")
            self._need_enough(self._dealt, "shared their keys")
        parcels = {}
        for peer in self._member(client):
            if dealing := self._dealt.get(peer):
                answer, sealed = (
                    dealing.value(self.groups.group(peer).index(client) + 1),
                    dealing.sealed.get(client, b""),
                )
                parcels[peer] = Parcel(dealing.hashes[client], self._challenges[peer], answer, sealed)
        message = write_inbox(parcels)
        self.down["share_keys"] += len(message)
        return message

    def add_checked(self, client: str, data: bytes) -> None:
        """Add a client's report of the neighbors whose shares are wrong."""
        self._receive("check", client, data, client in self._reports)
        if client not in self._dealt:
            raise ProtocolError(f"{client} checked shares without having shared its keys")
        report = Report.from_bytes(data)
        if strange := report.wrong - set(self._member(client)):
            raise ProtocolError(f"{client} reports {min(strange)}, of which it has no shares")
        self._check_signature(client, report.signed_part(self.setup.context, self._roster), report.signature)
        self._reports[client] = report.wrong & self._dealt.keys()

    def present(self) -> bytes:
        """Return the clients that share masks, for each of them.

        Raises:
            TooFewClients: If too few clients are left.
        """
        if "check" not in self._closed:
            self._closed.add("check")
            self._shared = self._settle()
            self._need_enough(self._shared, "shared their keys")
        message = Stayed(self._shared, frozenset()).to_bytes(self.groups.roster)
        self.down["check"] += len(message)
        return message

    def _settle(self) -> frozenset[str]:
        """Decide who shares masks, from the reports.

        As many clients as may collude, and at least one, may be wrong. Whoever reports more than that is wrong, and so
        is whoever more than that report. Else a report costs one share, and one of the two is wrong. The accused stays
        if enough others have its shares, with some to spare for dropouts where the round has.
        """
        settings, there = self.setup.settings, set(self._reports)
        most = max(1, colluding_clients(settings, len(self.groups.roster)))
        spare = math.ceil(settings.dropouts * len(self.groups.roster))
        for client, wrong in self._reports.items():
            if len(wrong) > most:
                self.expelled[client] = f"says that it cannot use the shares of {len(wrong)} clients"
        there -= self.expelled.keys()
        accused = {client: {peer for peer in there if client in self._reports[peer]} for client in there}
        for client, peers in accused.items():
            if len(peers) > most:
                self.expelled[client] = f"shared its keys so that {len(peers)} clients cannot use the shares"
        there -= self.expelled.keys()
        for client in sorted(there, key=lambda name: (-len(accused[name]), name)):
            if peers := accused[client] & there:
                said = f"{' and '.join(sorted(peers))} cannot use the shares of {client}, or say so"
                holders = there.intersection(self.groups.neighbors[client]) - peers
                room = spare if len(there) > self.groups.needed + spare else 0
                if len(holders) < self.groups.threshold + room:
                    there.remove(client)
                    self.expelled[client] = f"{said}; too few others can"
                self.disputes |= dict.fromkeys(((peer, client) for peer in peers), said)
        return frozenset(there)

    def add_masked(self, client: str, data: bytes) -> None:
        """Add a client's masked vector to the sum."""
        self._receive("mask", client, data, client in self._masked)
        if client not in self._shared:
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
        message = Stayed(self._shared, frozenset(self._masked)).to_bytes(self.groups.roster)
        self.down["mask"] += len(message)
        return message

    def add_confirmed(self, client: str, data: bytes) -> None:
        """Add a client's signature of the lists."""
        self._receive("confirm", client, data, client in self._confirmed)
        if client not in self._masked:
            raise ProtocolError(f"{client} confirmed a sum without having sent a vector")
        stayed = Stayed(self._shared, frozenset(self._masked))
        self._check_signature(client, stayed.signed_part(self.setup.context, self._roster), data)
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
        """Add a client's shares of the secrets of its group.

        Raises:
            ProtocolError: If the message cannot be read, or has wrong shares. The right ones are used all the same.
        """
        self._receive("unmask", client, data, client in self._unmasked)
        if client not in self._confirmed:
            raise ProtocolError(f"{client} sent shares without having confirmed the sum")
        found = UnmaskedShares.from_bytes(data)
        seeds, keys = (self._right(client, *part) for part in ((SEED, found.seeds), (KEY, found.keys)))
        self._unmasked[client] = UnmaskedShares(seeds, keys)
        wrong = (found.seeds.keys() - seeds.keys()) | (found.keys.keys() - keys.keys())
        wanted = set(self.groups.group(client)) & self._shared - {client} - self._reports[client]
        if missing := (wrong & self._shared) | (wanted - seeds.keys() - keys.keys()):
            raise ProtocolError(f"{client} sent a wrong share of the secret of {min(missing)}, or none")

    def _right(self, client: str, kind: bytes, shares: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return those shares of a client that their dealers published the hashes of."""
        context, place = self.setup.context, KINDS.index(kind) * HASH_BYTES
        due = self._masked if kind == SEED else self.dropped
        return {
            dealer: share
            for dealer, share in shares.items()
            if dealer in due
            and client in self._dealt[dealer].hashes
            and hash_of(context, dealer, client, kind, share)
            == self._dealt[dealer].hashes[client][place : place + HASH_BYTES]
        }

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
            if public_point(seed) != self.groups.roster[client].commitment:
                raise ProtocolError(f"the shares of the seed of {client} do not give it; {client} shared a wrong one")
            add_mask(total, derive(seed, context, OWN_MASK), -1)
        for client in self.dropped:
            secret = self._recover(client, {name: each.keys for name, each in self._unmasked.items()})
            if public_point(secret) != self.groups.roster[client].mask_key:
                raise ProtocolError(f"the shares of the key of {client} do not give it; {client} shared a wrong one")
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

    @property
    def _about(self) -> bytes:
        return self.setup.context + hashlib.sha256(self._roster).digest()

    def _check_signature(self, client: str, text: bytes, signature: bytes) -> None:
        if self.verify and not self.verify(client, text, signature):
            raise ProtocolError(f"{client} sent a wrong signature")

    def _member(self, client: str) -> tuple[str, ...]:
        if client not in self.groups.neighbors:
            raise ProtocolError(f"{client} is not in the roster of the round")
        return self.groups.neighbors[client]

    def _need_enough(self, clients: Collection[str], what: str) -> None:
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
