"""A client that sends garbage, at any stage, costs itself and not the round; no honest client alone is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ed25519
from secure_fixtures import names

from partita.core.secure_settings import SecureAggregation
from partita.secure_aggregation import curve
from partita.secure_aggregation.client import SecureClient
from partita.secure_aggregation.dealing import KINDS, VALUES_BYTES, Dealing, deal, hash_of
from partita.secure_aggregation.encoding import ProtocolError, TooFewClients
from partita.secure_aggregation.fixed_point import FixedPoint, Layout
from partita.secure_aggregation.key_agreement import encrypt, new_secret, public_key
from partita.secure_aggregation.messages import Advertisement, Report, UnmaskedShares
from partita.secure_aggregation.round_setup import RoundSetup
from partita.secure_aggregation.secret_sharing import draw, value
from partita.secure_aggregation.server import SecureServer, Stage

Spoil = Callable[["Round", bytes], bytes | None]  # an honest answer -> what the hostile client sends; None for nothing


@dataclass
class Round:
    """A round with signed keys in which one client changes what it sends at one stage."""

    count: int
    hostile: str
    stage: Stage
    spoil: Spoil
    blamed: dict[str, str] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        layout = Layout((("delta", "a", (2,)),), False)
        self.setup = RoundSetup(SecureAggregation(), b"hostile", layout, FixedPoint(64, self.count, 1.0, 100.0))
        keys = {name: ed25519.Ed25519PrivateKey.generate() for name in names(self.count)}

        def verify(client: str, text: bytes, signature: bytes) -> bool:
            try:
                keys[client].public_key().verify(signature, text)
            except InvalidSignature:
                return False
            return True

        self.verify, self.sign = verify, {name: key.sign for name, key in keys.items()}
        self.server = SecureServer(self.setup, verify)
        self.clients = {name: SecureClient(self.setup, name) for name in keys}

    def play(self) -> torch.Tensor:
        """Play all stages, and return the sum."""
        server, clients, sign = self.server, self.clients, self.sign
        vectors = {name: torch.arange(4) + 100 * place for place, name in enumerate(clients)}
        left = self._ask("advertise", list(clients), lambda name: clients[name].advertise(sign[name]), "advertisement")
        roster = server.roster()
        left = self._ask("share_keys", left, lambda name: clients[name].share_keys(roster, self.verify), "shares")
        left = self._ask("check", left, lambda name: clients[name].check(server.inbox(name), sign[name]), "checked")
        lists = server.present()
        self.blamed |= server.expelled
        left = [name for name in left if name in server.shared]
        left = self._ask("mask", left, lambda name: clients[name].mask(lists, vectors[name]), "masked")
        lists = server.lists()
        left = self._ask("confirm", left, lambda name: clients[name].confirm(lists, sign[name]), "confirmed")
        signatures = server.signatures()
        self._ask("unmask", left, lambda name: clients[name].unmask(signatures, self.verify), "unmasked")
        total = server.sum()
        assert torch.equal(total, sum(vectors[name] for name in server.survivors))
        return total

    def _ask(self, stage: Stage, left: Sequence[str], answer: Callable[[str], bytes], kind: str) -> list[str]:
        there = []
        for name in left:
            data: bytes | None = answer(name)
            if stage == self.stage and name == self.hostile:
                data = self.spoil(self, data)
            if data is None:
                self.silent.add(name)
                continue
            try:
                getattr(self.server, f"add_{kind}")(name, data)
            except ProtocolError as error:
                self.blamed[name] = str(error)
                continue
            there.append(name)
        return there


def nothing(round: Round, data: bytes) -> None:
    return None


def garbage(round: Round, data: bytes) -> bytes:
    return b"\xff" * len(data)


def cut(round: Round, data: bytes) -> bytes:
    return data[: len(data) // 2]


def resigned(round: Round, changed: Advertisement) -> bytes:
    return replace(changed, signature=round.sign[round.hostile](changed.signed_part(round.setup.context))).to_bytes()


def wrong_signature_of_keys(round: Round, data: bytes) -> bytes:
    return replace(Advertisement.from_bytes(data), signature=bytes(64)).to_bytes()


def unusable_cipher_key(round: Round, data: bytes) -> bytes:
    return resigned(round, replace(Advertisement.from_bytes(data), cipher_key=bytes(32)))


def unusable_mask_key(round: Round, data: bytes) -> bytes:
    return resigned(round, replace(Advertisement.from_bytes(data), mask_key=b"\x02" + b"\xff" * 32))


def wrong_commitment(round: Round, data: bytes) -> bytes:
    """Noticed when it shares its keys: they are not those of the roster."""
    round.clients[round.hostile]._seed = curve.new_number()
    return data


def other_cipher_key(round: Round, data: bytes) -> bytes:
    """Its advertisement is of another key than it uses, so nobody can open its shares, and it no others'."""
    client = round.clients[round.hostile]
    changed = resigned(round, replace(Advertisement.from_bytes(data), cipher_key=public_key(new_secret())))
    client._signature, honest = Advertisement.from_bytes(changed).signature, client._advertisement
    client._advertisement = lambda: Advertisement.from_bytes(changed)  # type: ignore[method-assign]
    assert honest
    return changed


def redeal(round: Round, change: Callable[[str, bytes], bytes], secrets: tuple[bytes, bytes] | None = None) -> bytes:
    """The dealing of the hostile client, with other sealed bytes or secrets."""
    client, groups = round.clients[round.hostile], round.server.groups
    about = round.server._about

    def seal(peer: str, values: bytes) -> bytes:
        return change(peer, encrypt(client._cipher_key(groups, peer, client.name), values, round.setup.context))

    secrets = secrets or (client._seed, client._mask_secret)
    group = groups.group(client.name)
    return deal(client.name, group, groups.threshold, secrets, round.setup.context, about, seal)[0].to_bytes()


def undecryptable_for_all(round: Round, data: bytes) -> bytes:
    return redeal(round, lambda peer, sealed: bytes(len(sealed)))


def undecryptable_for_one(round: Round, data: bytes) -> bytes:
    one = next(name for name in round.clients if name != round.hostile)
    return redeal(round, lambda peer, sealed: bytes(len(sealed)) if peer == one else sealed)


def other_secrets(round: Round, data: bytes) -> bytes:
    return redeal(round, lambda peer, sealed: sealed, (curve.new_number(), curve.new_number()))


def wrong_shares_for(count: int | None) -> Spoil:
    """Shares that do not match their hashes, for so many clients."""

    def spoil(round: Round, data: bytes) -> bytes:
        client, groups = round.clients[round.hostile], round.server.groups
        targets = [name for name in round.clients if name != round.hostile][:count]

        def change(peer: str, sealed: bytes) -> bytes:
            key = client._cipher_key(groups, peer, client.name)
            return encrypt(key, bytes(VALUES_BYTES), round.setup.context) if peer in targets else sealed

        return redeal(round, change)

    return spoil


def inconsistent_polynomials(round: Round, data: bytes) -> bytes:
    """Shares with matching hashes and a proof that the server accepts, of no polynomials of the degree."""
    client, groups = round.clients[round.hostile], round.server.groups
    group, context, about = groups.group(client.name), round.setup.context, round.server._about
    number = curve.new_number()
    secrets = [int.from_bytes(each, "big") for each in (client._seed, client._mask_secret, number)]
    low = [draw(secret, groups.threshold) for secret in secrets]
    high = [draw(secret, groups.threshold + 2) for secret in secrets]
    values = {name: [value(terms, place).to_bytes(32, "big") for terms in high] for place, name in enumerate(group, 1)}
    hashes = {
        name: b"".join(
            hash_of(context, client.name, name, kind, share) for kind, share in zip(KINDS, each, strict=True)
        )
        for name, each in values.items()
    }
    sealed = {
        peer: encrypt(client._cipher_key(groups, peer, client.name), b"".join(each), context)
        for peer, each in values.items()
        if peer != client.name
    }
    first = Dealing(curve.public_point(number), (), hashes, sealed)
    challenge = first.challenge(client.name, about)
    a, b = (int.from_bytes(challenge[place : place + 16], "big") for place in (0, 16))
    answer = tuple((a * one + b * two + three) % curve.ORDER for one, two, three in zip(*low, strict=True))
    return replace(first, answer=answer).to_bytes()


def signed_report(round: Round, wrong: set[str]) -> bytes:
    report = Report(frozenset(wrong))
    text = report.signed_part(round.setup.context, round.server.roster())
    return replace(report, signature=round.sign[round.hostile](text)).to_bytes()


def report_of_all(round: Round, data: bytes) -> bytes:
    return signed_report(round, set(round.clients) - {round.hostile})


def report_of_one(round: Round, data: bytes) -> bytes:
    return signed_report(round, {max(set(round.clients) - {round.hostile})})


def report_with_a_wrong_signature(round: Round, data: bytes) -> bytes:
    return Report(frozenset(), bytes(64)).to_bytes()


def wrong_shares_when_unmasking(round: Round, data: bytes) -> bytes:
    found = UnmaskedShares.from_bytes(data)
    seven = bytes(31) + b"\x07"
    return UnmaskedShares(dict.fromkeys(found.seeds, seven), dict.fromkeys(found.keys, seven)).to_bytes()


def one_wrong_share_when_unmasking(round: Round, data: bytes) -> bytes:
    found = UnmaskedShares.from_bytes(data)
    return UnmaskedShares({**found.seeds, max(found.seeds): bytes(32)}, found.keys).to_bytes()


def no_shares_when_unmasking(round: Round, data: bytes) -> bytes:
    return UnmaskedShares({}, {}).to_bytes()


def wrong_signature(round: Round, data: bytes) -> bytes:
    return bytes(64)


KINDS_OF_GARBAGE: list[tuple[Stage, Spoil]] = [
    *((stage, spoil) for stage in ("advertise", "share_keys", "check", "mask", "confirm", "unmask")
      for spoil in (nothing, garbage, cut)),  # type: ignore[list-item]
    ("advertise", wrong_signature_of_keys),
    ("advertise", unusable_cipher_key),
    ("advertise", unusable_mask_key),
    ("advertise", other_cipher_key),
    ("share_keys", undecryptable_for_all),
    ("share_keys", undecryptable_for_one),
    ("share_keys", other_secrets),
    ("share_keys", wrong_shares_for(1)),
    ("share_keys", wrong_shares_for(2)),
    ("share_keys", wrong_shares_for(None)),
    ("share_keys", inconsistent_polynomials),
    ("check", report_of_all),
    ("check", report_of_one),
    ("check", report_with_a_wrong_signature),
    ("unmask", wrong_shares_when_unmasking),
    ("unmask", one_wrong_share_when_unmasking),
    ("unmask", no_shares_when_unmasking),
    ("confirm", wrong_signature),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "spoil"), KINDS_OF_GARBAGE, ids=lambda each: getattr(each, "__name__", str(each)))
@pytest.mark.parametrize(
    ("count", "places"),
    [(4, [2]), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(4, [0, 3]), (10, [0, 5, 9])])],
)
def test_round_is_not_lost_and_the_hostile_client_is_named(
    count: int, places: list[int], stage: Stage, spoil: Spoil
) -> None:
    for place in places:
        hostile = names(count)[place]
        played = Round(count, hostile, stage, spoil)
        played.play()
        assert played.silent <= {hostile}
        assert all(name == hostile or hostile in why for name, why in played.blamed.items()), "no honest client alone"
        pairs = set(played.server.disputes)
        assert all(hostile in pair for pair in pairs)
        assert played.blamed or played.silent or pairs, "somebody is named"
        assert len(played.server.survivors) >= count - 1


def test_round_is_lost_if_too_few_honest_clients_answer() -> None:
    """Three of four must stay, and here two are hostile."""
    played = Round(4, "c000", "unmask", nothing)
    received = played.server.add_unmasked
    played.server.add_unmasked = lambda name, data: None if name == "c001" else received(name, data)  # type: ignore
    with pytest.raises(
        TooFewClients, match="2 clients sent a share of the secret of c000, and the threshold is 3 of 4"
    ):
        played.play()


def test_dropout_besides_a_hostile_client_costs_no_round_where_the_threshold_allows_it() -> None:
    """Seven of ten must stay: one shares wrong values with two, and another drops out later."""
    played = Round(10, "c004", "share_keys", wrong_shares_for(2))
    ask = played._ask

    def drop(stage: Stage, left: Sequence[str], answer: Callable[[str], bytes], kind: str) -> list[str]:
        return ask(stage, [name for name in left if stage != "mask" or name != "c009"], answer, kind)

    played._ask = drop  # type: ignore[method-assign]
    played.play()
    assert played.server.dropped == ("c009",)
