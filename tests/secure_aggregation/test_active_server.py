"""A server that tells clients different things opens no sum of fewer updates than promised."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, product

import pytest
import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ed25519
from secure_fixtures import names
from torch import Tensor

from partita.core.secure_settings import SecureAggregation
from partita.secure_aggregation.client import OWN_MASK, SecureClient
from partita.secure_aggregation.encoding import ProtocolError, TooFewClients
from partita.secure_aggregation.fixed_point import FixedPoint, Layout
from partita.secure_aggregation.groups import pair_mask
from partita.secure_aggregation.key_agreement import derive, new_secret
from partita.secure_aggregation.masks import add_mask
from partita.secure_aggregation.messages import (
    Sign,
    Stayed,
    UnmaskedShares,
    Verify,
    read_roster,
    read_vector,
    write_roster,
    write_signatures,
)
from partita.secure_aggregation.neighbors import withstood
from partita.secure_aggregation.round_setup import RoundSetup
from partita.secure_aggregation.secret_sharing import recover
from partita.secure_aggregation.server import SecureServer

SIZES = [*range(3, 8), *(pytest.param(count, marks=pytest.mark.slow) for count in (*range(8, 14), 20, 32))]
SHARES = [0.5, 0.6, 0.66]


def tiny_setup(count: int, settings: SecureAggregation, round_id: bytes = b"active") -> RoundSetup:
    layout = Layout((("delta", "a", (2,)),), False)
    return RoundSetup(settings, round_id, layout, FixedPoint(settings.bits, count, 1.0, 100.0))


class Keys:
    """Long-term keys: of Ed25519, or quick ones in place of them, with which there can be many clients."""

    def __init__(self, clients: Collection[str], real: bool) -> None:
        self.real = {name: ed25519.Ed25519PrivateKey.generate() for name in clients} if real else {}
        self.quick = {name: new_secret() for name in clients}

    def sign(self, client: str) -> Sign:
        return self.real[client].sign if self.real else lambda text: hmac.digest(self.quick[client], text, "sha256")

    def verify(self, client: str, text: bytes, signature: bytes) -> bool:
        if not self.real:
            return client in self.quick and hmac.compare_digest(
                hmac.digest(self.quick[client], text, "sha256"), signature
            )
        try:
            self.real[client].public_key().verify(signature, text)
        except (InvalidSignature, KeyError):
            return False
        return True


@dataclass
class Attack:
    """A server that sends what it likes, after honest first stages.

    Attributes:
        setup: The setup of the round.
        colluding: Clients whose secrets and long-term keys the server has.
        signed: Whether clients sign and check signatures.
    """

    setup: RoundSetup
    clients: list[str]
    colluding: Collection[str] = ()
    signed: bool = True
    real: bool = False

    def __post_init__(self) -> None:
        self.keys = Keys(self.clients, self.real)
        self.verify: Verify | None = self.keys.verify if self.signed else None
        self.server = SecureServer(self.setup)
        self.parties = {name: SecureClient(self.setup, name) for name in self.clients}
        for name, party in self.parties.items():
            self.server.add_advertisement(name, party.advertise(self.sign(name)))
        for name, party in self.parties.items():
            self.server.add_shares(name, party.share_keys(self.server.roster(), self.verify))
        for name, party in self.parties.items():
            self.server.add_checked(name, party.check(self.server.inbox(name), self.sign(name)))
        self.server.present()
        self.groups = self.server.groups
        self.updates = {name: torch.arange(4) + 1000 * place for place, name in enumerate(self.clients, 1)}
        self.vectors: dict[str, Tensor] = {}
        self.inboxes: dict[str, set[str]] = {}
        self.lists: dict[str, Stayed] = {}
        self.signatures: dict[str, bytes] = {}
        self.released: dict[str, UnmaskedShares] = {}

    def sign(self, name: str) -> Sign | None:
        return self.keys.sign(name) if self.signed else None

    def mask(self, name: str, peers: Collection[str] | None = None) -> None:
        """Let a client mask with these peers; None for all."""
        shared = set(self.clients if peers is None else [*peers, name])
        lists = Stayed(frozenset(shared), frozenset())
        message = self.parties[name].mask(lists.to_bytes(self.clients), self.updates[name])
        self.vectors[name] = read_vector(message, 4, self.setup.dtype).clone()
        self.inboxes[name] = shared.intersection(self.groups.neighbors[name])

    def confirm(self, name: str, masked: Collection[str], shared: Collection[str] | None = None) -> None:
        """Tell a client who stayed, and keep its signature if it gives one."""
        lists = Stayed(frozenset(self.clients if shared is None else shared), frozenset(masked))
        try:
            self.signatures[name] = self.parties[name].confirm(lists.to_bytes(self.clients), self.sign(name))
            self.lists[name] = lists
        except ProtocolError:
            pass

    def unmask(self) -> None:
        """Send to each client that confirmed a list all signatures of this list, and those of colluding clients."""
        for name, lists in self.lists.items():
            given = {peer: its for peer, its in self.signatures.items() if self.lists[peer] == lists or not self.signed}
            text = lists.signed_part(self.setup.context, self.server.roster())
            given |= {peer: self.keys.sign(peer)(text) for peer in self.colluding}
            try:
                message = self.parties[name].unmask(write_signatures(given, lists.masked), self.verify)
                self.released[name] = UnmaskedShares.from_bytes(message)
            except TooFewClients:
                pass

    def secrets(self, seeds: bool) -> dict[str, bytes]:
        """The secrets of which the server has enough shares: seeds of own masks, or private mask keys."""
        found = {}
        for client in self.clients:
            shares = {}
            for place, peer in enumerate(self.groups.group(client), 1):
                given = self.released.get(peer)
                held = self.parties[peer]._shares.get(client) if peer in self.colluding else None
                share = held[not seeds] if held else given and (given.seeds if seeds else given.keys).get(client)
                if share and peer != (client if not seeds else ""):
                    shares[place] = share
            if len(shares) >= self.groups.threshold:
                found[client] = recover(shares, self.groups.threshold)
        found |= {} if seeds else {name: self.parties[name]._mask_secret for name in self.colluding}
        return found

    def opened(self) -> list[set[str]]:
        """The smallest sums that the server can open, one for each honest client whose update is in one."""
        seeds, keys = self.secrets(True), self.secrets(False)
        both = seeds.keys() & keys.keys() - set(self.colluding)
        assert not both, "both secrets of one client"
        honest = [name for name in self.vectors if name not in self.colluding]
        return [members for name in honest if (members := self._sum_with(name, seeds, keys))]

    def _sum_with(self, name: str, seeds: Mapping[str, bytes], keys: Mapping[str, bytes]) -> set[str]:
        """The clients whose updates must be in a sum with that of a client; none if there is no such sum."""
        members, new = set[str](), {name}
        while new:
            members |= new
            new = {peer for member in new for peer in self.inboxes.get(member, ())} - members - keys.keys()
        if not members <= self.vectors.keys() & seeds.keys():
            return set()
        total = sum((self.vectors[member] for member in members), torch.zeros(4, dtype=torch.int64))
        for member in members:
            add_mask(total, derive(seeds[member], self.setup.context, OWN_MASK), -1)
            for peer in self.inboxes[member] - members:
                key = pair_mask(self.setup, keys[peer], self.groups.roster[member].mask_key)
                add_mask(total, key, -1 if member < peer else 1)
        return members if torch.equal(total, sum(self.updates[member] for member in members)) else set()


def other_lists_for_each(attack: Attack) -> None:
    """The target masks with as few peers as possible. Others hear that some of these dropped out, not all the same.

    So none of them sees fewer than the threshold, and together they give the keys of all peers of the target.
    """
    target, *others = attack.clients
    needed, count = attack.groups.needed, len(attack.clients)
    peers, place = others[: needed - 1], 0
    attack.mask(target, peers)
    for name in others:
        attack.mask(name)
        gone = set[str]()
        while len(gone) < min(count - needed, len(set(peers) - {name})):
            gone |= {peers[place % len(peers)]} - {name}
            place += 1
        attack.confirm(name, set(attack.clients) - gone)
    attack.confirm(target, attack.clients[:needed], attack.clients[:needed])
    attack.unmask()


def two_halves(attack: Attack) -> None:
    """One half hears that the target stayed and the other that it dropped out."""
    for place, name in enumerate(attack.clients):
        attack.mask(name)
        attack.confirm(name, attack.clients if place <= len(attack.clients) // 2 else attack.clients[1:])
    attack.unmask()


def cut_off(attack: Attack) -> None:
    """Colluding clients sign what honest ones do; the peers of the target are said to have dropped out."""
    honest = [name for name in attack.clients if name not in attack.colluding]
    signing = attack.groups.needed - len(attack.colluding)
    signers, target, gone = honest[:signing], honest[signing], honest[signing + 1 :]
    peers = [*gone, *attack.colluding, *signers][: attack.groups.threshold - 1]
    for name in attack.clients:
        attack.mask(name, peers if name == target else None)
    for name in signers:
        attack.confirm(name, {*signers, target, *attack.colluding})
    attack.unmask()


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("share", SHARES)
def test_server_that_sends_different_lists_opens_no_sum_below_the_threshold(count: int, share: float) -> None:
    settings = SecureAggregation(threshold=share, collusion=0.0, neighbors=count)  # all are neighbors of all
    for play in (other_lists_for_each, two_halves):
        attack = Attack(tiny_setup(count, settings), names(count), real=count < 10)
        play(attack)
        assert all(len(found) >= attack.groups.needed for found in attack.opened())
        if play is other_lists_for_each and count > attack.groups.needed:
            assert not attack.released, "each has signed another list, so none has enough signatures"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("count", "share"), [(5, 0.5), (10, 0.5), (20, 0.5), (20, 0.6)])
def test_without_signatures_it_opens_a_single_update(count: int, share: float) -> None:
    """The attack itself: what clients refuse is what it needs."""
    attack = Attack(tiny_setup(count, SecureAggregation(threshold=share, collusion=0.0)), names(count), signed=False)
    other_lists_for_each(attack)
    assert {"c000"} in attack.opened()


def test_honest_server_opens_the_sum_of_all() -> None:
    attack = Attack(tiny_setup(5, SecureAggregation()), names(5), real=True)
    for name in names(5)[:4]:
        attack.mask(name)
    for name in names(5)[:4]:
        attack.confirm(name, names(5)[:4])
    attack.unmask()
    assert attack.opened() == [set(names(5)[:4])] * 4


@pytest.mark.parametrize("count", [6, pytest.param(9, marks=pytest.mark.slow)])
def test_as_many_colluding_clients_as_promised_open_nothing_and_one_more_would(count: int) -> None:
    signed = SecureAggregation(signers={})
    most = withstood(signed, count).lying
    assert most is not None
    for many in range(most + 2):
        attack = Attack(tiny_setup(count, signed), names(count), names(count)[count - many :])
        cut_off(attack)
        opened = [found - set(attack.colluding) for found in attack.opened()]
        if many <= most:
            assert all(len(found) >= attack.groups.needed - many for found in opened)
        else:
            assert min(map(len, opened)) == 1, "the bound is tight"


@pytest.mark.slow
@pytest.mark.parametrize("play", [other_lists_for_each, two_halves])
def test_server_opens_no_small_sum_of_a_sparse_graph_with_all_who_may_collude(play: Callable[[Attack], None]) -> None:
    settings = SecureAggregation(threshold=0.75, collusion=0.1, signers={})
    most = withstood(settings, 72).lying
    assert most == 10
    attack = Attack(tiny_setup(72, settings), names(72), names(72)[72 - most :])
    assert len(attack.groups.neighbors["c000"]) == 44
    with suppress(TooFewClients):  # a client whose group would be too small does not even mask
        play(attack)
    assert all(len(found - set(attack.colluding)) >= attack.groups.needed - most for found in attack.opened())


# ---- what a client refuses


def masked_attack(count: int = 5, round_id: bytes = b"active", **more: object) -> Attack:
    """All clients have masked, with all peers."""
    attack = Attack(tiny_setup(count, SecureAggregation(**more), round_id), names(count), real=True)  # type: ignore[arg-type]
    for name in attack.clients:
        attack.mask(name)
    return attack


def test_client_counts_signatures_of_its_own_lists_by_those_in_the_sum() -> None:
    """Four of five must sign. Neither of these is a signature: of another round, roster, list or client."""
    attack, other = masked_attack(), masked_attack(round_id=b"before")
    clients, context, roster = attack.clients, attack.setup.context, attack.server.roster()
    lists, all_masked = (Stayed(frozenset(clients), frozenset(masked)) for masked in (clients[:4], clients))
    for name in clients[:3]:
        attack.confirm(name, lists.masked)
    text = lists.signed_part(context, roster)
    sign = {name: attack.keys.sign(name) for name in clients}
    wrong = {
        "nothing": b"",
        "another round": sign["c003"](lists.signed_part(other.setup.context, roster)),
        "another roster": sign["c003"](lists.signed_part(context, other.server.roster())),
        "another list": sign["c003"](all_masked.signed_part(context, roster)),
        "a client that dropped out": sign["c004"](text),
        "a client twice": attack.signatures["c002"],
        "a key of the server": ed25519.Ed25519PrivateKey.generate().sign(text),
        "its advertisement": read_roster(roster)["c003"].signature,
    }
    for why, signature in wrong.items():
        message = write_signatures({**attack.signatures, "c003": signature}, lists.masked)
        with pytest.raises(TooFewClients, match="3 of 4 clients confirmed who is in the sum as c000 did"):
            attack.parties["c000"].unmask(message, attack.verify)
        assert attack.parties["c000"]._shares, why
    with pytest.raises(ProtocolError, match="there are 5 signatures of 4 clients"):
        attack.parties["c000"].unmask(write_signatures(attack.signatures, clients), attack.verify)
    right = write_signatures({**attack.signatures, "c003": sign["c003"](text)}, lists.masked)
    assert UnmaskedShares.from_bytes(attack.parties["c000"].unmask(right, attack.verify)).keys.keys() == {"c004"}


def test_client_confirms_only_what_it_saw_and_once() -> None:
    attack = masked_attack()
    everyone, party, sign = frozenset(attack.clients), attack.parties["c000"], attack.sign("c000")
    refused = {
        "says that c004 did not share its keys": Stayed(everyone - {"c004"}, everyone - {"c004"}),
        "says that c000 dropped out": Stayed(everyone, everyone - {"c000"}),
        "3 clients of the group of c000 sent their vector, and the threshold is 4": Stayed(
            everyone, frozenset(names(3))
        ),
    }
    for match, lists in refused.items():
        with pytest.raises(ProtocolError, match=match):
            party.confirm(lists.to_bytes(everyone), sign)
    for bad in (b"L\x01\x04\0\0\0\2\2\2\2", b"L\x01\x05\0\0\0\2\2\2\2\3", b"L\x01", b""):
        with pytest.raises(ProtocolError, match=r"the 5 of the roster|expected a message"):
            party.confirm(bad, sign)
    party.confirm(Stayed(everyone, everyone).to_bytes(everyone), sign)
    with pytest.raises(ProtocolError, match="each stage happens once"):
        party.confirm(Stayed(everyone, everyone - {"c004"}).to_bytes(everyone), sign)
    with pytest.raises(ProtocolError, match="'unmask' is next"):
        party.mask(attack.server.present(), attack.updates["c000"])


def test_client_gives_no_share_of_a_client_without_masks_in_the_sum() -> None:
    """It holds shares of c004, which answered too late to share masks."""
    attack = Attack(tiny_setup(5, SecureAggregation()), names(5), real=True)
    for name in names(4):
        attack.mask(name, names(4))
    for name in names(4):
        attack.confirm(name, names(4), names(4))
    attack.unmask()
    assert [(set(each.seeds), set(each.keys)) for each in attack.released.values()] == [(set(names(4)), set())] * 4


def test_client_that_masked_without_a_peer_confirms_no_list_with_that_peer() -> None:
    attack = Attack(tiny_setup(5, SecureAggregation()), names(5), real=True)
    attack.mask("c000", names(4))
    with pytest.raises(ProtocolError, match="says that c004 shared its keys, but it told c000 otherwise before"):
        attack.parties["c000"].confirm(Stayed(frozenset(names(5)), frozenset(names(4))).to_bytes(names(5)))


@pytest.mark.parametrize("small", [1, 2])
def test_roster_of_few_clients_is_refused(small: int) -> None:
    """Whatever share of them must stay: `min_clients` is a number."""
    setup = tiny_setup(5, SecureAggregation(threshold=0.5, collusion=0.0))
    clients = {name: SecureClient(setup, name) for name in names(5)}
    server = SecureServer(setup)
    for name, party in clients.items():
        server.add_advertisement(name, party.advertise())
    roster = read_roster(server.roster())
    with pytest.raises(TooFewClients, match="min_clients is 3"):
        clients["c000"].share_keys(write_roster({name: roster[name] for name in names(small)}))


def test_clients_of_the_server_in_the_roster_are_refused_if_keys_are_signed() -> None:
    """Three clients of the server's own would be enough to open the update of the fourth."""
    setup = tiny_setup(4, SecureAggregation())
    keys, party = Keys(["c000"], real=True), SecureClient(setup, "c000")
    server = SecureServer(setup)
    server.add_advertisement("c000", party.advertise(keys.sign("c000")))
    for name in ("s1", "s2", "s3"):
        own = ed25519.Ed25519PrivateKey.generate()
        server.add_advertisement(name, SecureClient(setup, name).advertise(own.sign))
    with pytest.raises(ProtocolError, match="the keys of s1 in the roster are not signed by it"):
        party.share_keys(server.roster(), keys.verify)
    party.share_keys(server.roster())  # without signatures, it cannot tell


# ---- sparse graphs


def arrangements(count: int, colluding: frozenset[int]) -> Iterator[tuple[set[int], set[int]]]:
    """Who stayed and who of these signed, of those that do not collude, on a circle."""
    honest = [place for place in range(count) if place not in colluding]
    for states in product(range(3), repeat=len(honest)):
        yield (
            {place for place, state in zip(honest, states, strict=True) if state},
            {place for place, state in zip(honest, states, strict=True) if state == 2},
        )


def smallest_sum(count: int, half: int, group: int, needed: int, colluding: frozenset[int]) -> int | None:
    """The fewest honest clients in a sum that a server can open on a circle, by trying everything.

    Too much is allowed to the server: each client that did not sign has the inbox that suits the sum best.
    """
    near = [{(place + step) % count for step in range(-half, half + 1)} for place in range(count)]
    smallest: int | None = None
    for stayed, signed in arrangements(count, colluding):
        if len(signed | colluding) < needed:
            continue
        if any(len(near[place] & (stayed | colluding)) < group for place in signed):
            continue
        gone = set(range(count)) - stayed  # their masks can be recovered, or the server has them
        known = [place for place in stayed if len(near[place] & (signed | colluding)) >= group]
        for size in range(1, min(len(known), (smallest or count + 1) - 1) + 1):
            for chosen in combinations(known, size):
                members = set(chosen)
                if all(
                    near[place] & stayed <= members if place in signed else len(near[place] & (gone | members)) >= group
                    for place in chosen
                ):
                    smallest = size
                    break
            if smallest == size:
                break
    return smallest


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("count", "half"), [(6, 1), (8, 1), (7, 2), (8, 2), (8, 3)])
@pytest.mark.parametrize("many", [0, 1])
def test_no_sum_on_a_small_circle_is_below_the_bound(count: int, half: int, many: int) -> None:
    """The conditions of `_inseparable`, for all that clients could be told. A lower threshold lets arcs be cut off."""
    colluding, neighbors = frozenset(range(many)), 2 * half
    round_bound, group_bound = (count + many) // 2 + 1, half + many + 2  # of one client, one is in a row
    for needed in range(round_bound, count + 1):
        for group in range(group_bound, neighbors + 2):
            found = smallest_sum(count, half, group, needed, colluding)
            assert found is None or found >= needed - many
    if (half, many) == (1, 0):
        assert smallest_sum(count, half, group_bound - 1, round_bound, colluding) == 2, "the bound is tight"
