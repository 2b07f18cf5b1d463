"""The client's side of the protocol: six stages, each of which can happen once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import torch

from partita.secure_aggregation.curve import NUMBER_BYTES, new_number, public_point
from partita.secure_aggregation.dealing import check_values, deal
from partita.secure_aggregation.encoding import (
    ProtocolError,
    TooFewClients,
    read_message,
    read_name,
    records,
    write_message,
)
from partita.secure_aggregation.groups import Groups, find_groups, pair_mask
from partita.secure_aggregation.key_agreement import (
    KEY_BYTES,
    agree,
    decrypt,
    derive,
    encrypt,
    new_secret,
    public_key,
)
from partita.secure_aggregation.masks import add_mask
from partita.secure_aggregation.messages import (
    Advertisement,
    Report,
    Sign,
    Stayed,
    UnmaskedShares,
    Verify,
    read_inbox,
    read_roster,
    read_signatures,
    write_roster,
    write_vector,
)
from partita.secure_aggregation.round_setup import RoundSetup

START, ADVERTISED, SHARED, CHECKED, MASKED, CONFIRMED, DONE = range(7)  # what a client has done
OWN_MASK = "own mask"
_NEXT = ("advertise", "share_keys", "check", "mask", "confirm", "unmask")


@dataclass
class SecureClient:
    """One client in one round.

    Each method takes the server's message of the stage before and returns the client's message. A client enforces by
    itself that

    - its own keys are in the roster unchanged, all keys are distinct, and with `verify` all are signed;
    - it keeps the shares of a neighbor only if they are those that the neighbor published, and reports the others;
    - it masks its vector once, for one list of clients that shared their keys, and only if enough of its group are
      there;
    - it confirms one list of those that stayed, which agrees with that, and only if the vectors of enough of its group
      arrived;
    - it unmasks once, for this list, with `verify` only if enough others confirmed the same one, and for each peer it
      gives either the share of the seed or that of the private mask key, never both.

    Attributes:
        setup: The public facts of the round.
        name: The client's name.
        stage: What the client has done. It never goes back.
    """

    setup: RoundSetup
    name: str
    stage: int = START
    _cipher_secret: bytes = field(default_factory=new_secret, repr=False)
    _mask_secret: bytes = field(default_factory=new_number, repr=False)
    _seed: bytes = field(default_factory=new_number, repr=False)
    _roster: bytes = field(default=b"", repr=False)
    _signature: bytes = field(default=b"", repr=False)
    _lists: bytes = field(default=b"", repr=False)
    _shares: dict[str, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)  # peer -> of its seed, of its key

    def advertise(self, sign: Sign | None = None) -> bytes:
        """Return the client's public keys.

        Args:
            sign: Signs bytes with the client's long-term key; None for no signature.
        """
        self._advance(START)
        mine = self._advertisement()
        self._signature = sign(mine.signed_part(self.setup.context)) if sign else b""
        return self._advertisement().to_bytes()

    def share_keys(self, roster: bytes, verify: Verify | None = None) -> bytes:
        """Return sealed shares of the client's two secrets for each neighbor.

        Args:
            roster: The server's message with the public keys of all clients.
            verify: Checks a signature of a client; None to accept keys without signatures.

        Raises:
            ProtocolError: If the roster is not acceptable.
        """
        self._expect(ADVERTISED)
        found = read_roster(roster)
        if found.get(self.name) != self._advertisement():
            raise ProtocolError(f"the roster does not have the keys that {self.name} advertised")
        for peer, its in found.items() if verify else ():
            assert verify is not None
            if not verify(peer, its.signed_part(self.setup.context), its.signature):
                raise ProtocolError(f"the keys of {peer} in the roster are not signed by it")
        groups = find_groups(self.setup, found, roster)

        def seal(peer: str, values: bytes) -> bytes:
            return encrypt(self._cipher_key(groups, peer, sender=self.name), values, self.setup.context)

        secrets, about = (self._seed, self._mask_secret), self.setup.context + hashlib.sha256(roster).digest()
        dealing, own = deal(
            self.name, groups.group(self.name), groups.threshold, secrets, self.setup.context, about, seal
        )
        self._shares[self.name] = own, bytes(NUMBER_BYTES)  # no one needs its own share of its own key
        self._roster = roster
        self._advance(ADVERTISED)
        return dealing.to_bytes()

    def check(self, inbox: bytes, sign: Sign | None = None) -> bytes:
        """Keep the shares of the neighbors that are right, and report the others.

        Args:
            inbox: The server's message with the shares of the neighbors.
            sign: Signs bytes with the client's long-term key; None for no signature.

        Raises:
            ProtocolError: If the message cannot be read, or has shares of others.
        """
        self._expect(SHARED)
        groups, parcels = self._groups(), read_inbox(inbox)
        if strange := parcels.keys() - set(groups.neighbors[self.name]):
            raise ProtocolError(f"the inbox has shares of {min(strange)}, which is not a neighbor of {self.name}")
        shares = {}
        for peer, parcel in parcels.items():
            try:
                values = decrypt(self._cipher_key(groups, peer, sender=peer), parcel.sealed, self.setup.context)
            except ProtocolError:
                continue
            names, context = (peer, self.name), self.setup.context
            if check_values(values, parcel.hashes, parcel.challenge, parcel.answer, names, context):
                shares[peer] = values[:NUMBER_BYTES], values[NUMBER_BYTES : 2 * NUMBER_BYTES]
        report = Report(frozenset(parcels.keys() - shares.keys()))
        signature = sign(report.signed_part(self.setup.context, self._roster)) if sign else b""
        self._shares |= shares
        self._advance(SHARED)
        return replace(report, signature=signature).to_bytes()

    def mask(self, lists: bytes, vector: torch.Tensor) -> bytes:
        """Return the masked vector.

        Args:
            lists: The server's message with the clients that shared their keys, with which masks are shared.
            vector: The vector of `FixedPoint.encode`; not changed.

        Raises:
            TooFewClients: If too few clients of the group are there.
            ProtocolError: If the client is not in the lists, or the vector has another length or type.
        """
        self._expect(CHECKED)
        if vector.dtype != self.setup.dtype or tuple(vector.shape) != (self.setup.layout.length,):
            raise ProtocolError(
                f"the vector is {vector.dtype} of shape {tuple(vector.shape)}; it must be {self.setup.dtype} of shape "
                f"({self.setup.layout.length},)"
            )
        groups = self._groups()
        shared = Stayed.from_bytes(lists, groups.roster).shared
        if self.name not in shared:
            raise ProtocolError(
                f"the server says that {self.name} did not share its keys, but it did; it does not mask"
            )
        near = shared.intersection(groups.neighbors[self.name])
        self._need_enough(groups, len(near) + 1, "shared their keys")
        masked = vector.clone(memory_format=torch.contiguous_format)
        add_mask(masked, derive(self._seed, self.setup.context, OWN_MASK), 1)
        for peer in near:
            key = pair_mask(self.setup, self._mask_secret, groups.roster[peer].mask_key)
            add_mask(masked, key, 1 if self.name < peer else -1)
        self._lists = lists
        self._advance(CHECKED)
        return write_vector(masked)

    def confirm(self, lists: bytes, sign: Sign | None = None) -> bytes:
        """Check who stayed, and return a signature of it: a client takes part in one sum of the round only.

        Args:
            lists: The server's message with the clients of the whole round that stayed.
            sign: Signs bytes with the client's long-term key; None for no signature.

        Raises:
            TooFewClients: If the vectors of too few clients arrived.
            ProtocolError: If the client knows that the lists are wrong.
        """
        self._expect(MASKED)
        groups = self._groups()
        stayed = Stayed.from_bytes(lists, groups.roster)
        if self.name not in stayed.masked:
            raise ProtocolError(
                f"the server says that {self.name} dropped out, but it sent its vector; it does not unmask"
            )
        if wrong := stayed.shared ^ self._stayed(groups).shared:
            raise ProtocolError(
                f"the server says that {min(wrong)} {'shared' if min(wrong) in stayed.shared else 'did not share'} its "
                f"keys, but it told {self.name} otherwise before; it does not unmask"
            )
        self._need_enough(groups, len(stayed.masked.intersection(groups.group(self.name))), "sent their vector")
        signature = sign(stayed.signed_part(self.setup.context, self._roster)) if sign else b""
        self._lists = lists
        self._advance(MASKED)
        return signature

    @property
    def survivors(self) -> tuple[str, ...]:
        """The clients of the sum that this client confirmed, sorted."""
        return tuple(sorted(self._stayed(self._groups()).masked))

    def unmask(self, signatures: bytes, verify: Verify | None = None) -> bytes:
        """Return shares of the secrets that the server needs for the sum. The client forgets its secrets.

        Args:
            signatures: The server's message with the signatures of those that confirmed the same lists.
            verify: Checks a signature of a client; None to trust the server, which may then have told others otherwise.

        Raises:
            TooFewClients: If too few clients confirmed the lists.
            ProtocolError: If the message cannot be read.
        """
        self._expect(CONFIRMED)
        groups = self._groups()
        stayed = self._stayed(groups)
        signed = stayed.signed_part(self.setup.context, self._roster)
        given = read_signatures(signatures, stayed.masked)
        agree = {name for name, its in given.items() if name == self.name or not verify or verify(name, signed, its)}
        if len(agree) < groups.needed:
            raise TooFewClients(
                f"{len(agree)} of {len(given)} clients confirmed who is in the sum as {self.name} did, and the "
                f"threshold is {groups.needed}; it does not unmask"
            )
        answer = UnmaskedShares(
            {peer: seed for peer, (seed, _) in self._shares.items() if peer in stayed.masked},
            {peer: key for peer, (_, key) in self._shares.items() if peer in stayed.shared - stayed.masked},
        )
        self._advance(CONFIRMED)
        self._cipher_secret = self._mask_secret = self._seed = bytes(KEY_BYTES)
        self._shares.clear()
        return answer.to_bytes()

    def to_bytes(self) -> bytes:
        """Return the state, for a process that continues the round. It holds the client's secrets."""
        secrets = [self._cipher_secret, self._mask_secret, self._seed]
        shares = [field for peer, pair in self._shares.items() for field in (peer.encode(), *pair)]
        head = [self.setup.context, self.name.encode(), bytes([self.stage]), *secrets, self._roster]
        head += [self._signature, self._lists]
        return write_message("T", [*head, *shares])

    @staticmethod
    def from_bytes(setup: RoundSetup, data: bytes) -> SecureClient:
        """Restore a client from `to_bytes`.

        Raises:
            ProtocolError: If the bytes are not the state of a client in this round.
        """
        fields = read_message("T", data)
        if len(fields) < 9 or len(fields[2]) != 1 or fields[2][0] > DONE or fields[0] != setup.context:
            raise ProtocolError("the stored state of secure aggregation is not of this round and these settings")
        _, name, stage, cipher_secret, mask_secret, seed, roster, signature, lists = fields[:9]
        shares = {
            read_name(peer): (of_seed, of_key)
            for peer, of_seed, of_key in records("T", fields[9:], (None, NUMBER_BYTES, NUMBER_BYTES))
        }
        secrets = cipher_secret, mask_secret, seed
        return SecureClient(setup, read_name(name), stage[0], *secrets, roster, signature, lists, shares)

    def _advertisement(self) -> Advertisement:
        points = public_point(self._mask_secret), public_point(self._seed)
        return Advertisement(self.name, public_key(self._cipher_secret), *points, self._signature)

    def _stayed(self, groups: Groups) -> Stayed:
        return Stayed.from_bytes(self._lists, groups.roster)

    def _groups(self) -> Groups:
        roster = read_roster(self._roster)
        return find_groups(self.setup, roster, write_roster(roster))

    def _cipher_key(self, groups: Groups, peer: str, sender: str) -> bytes:
        receiver = peer if sender == self.name else self.name
        purpose = f"shares from {sender!r} to {receiver!r}"
        return agree(self._cipher_secret, groups.roster[peer].cipher_key, self.setup.context, purpose)

    def _need_enough(self, groups: Groups, count: int, what: str) -> None:
        if count < groups.threshold:
            raise TooFewClients(
                f"{count} clients of the group of {self.name} {what}, and the threshold is {groups.threshold} of "
                f"{len(groups.group(self.name))}; {self.name} does not go on"
            )

    def _expect(self, stage: int) -> None:
        if self.stage != stage:
            expected = f"'{_NEXT[self.stage]}' is next" if self.stage < DONE else "its round is over"
            raise ProtocolError(f"{self.name} was asked to '{_NEXT[stage]}', but {expected}; each stage happens once")

    def _advance(self, stage: int) -> None:
        self._expect(stage)
        self.stage = stage + 1
