"""Attacks on single updates, by a server that reads all messages and by one that breaks the protocol."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from secure_fixtures import (
    confirm_stage,
    mask_stage,
    names,
    run_protocol,
    setup_for,
    share_stage,
    unmask_stage,
    write_ssh_keys,
)
from torch import Tensor

from partita.core.secure_settings import SecureAggregation
from partita.secure_aggregation.client import SHARED, SecureClient
from partita.secure_aggregation.curve import new_number, public_point
from partita.secure_aggregation.encoding import ProtocolError, TooFewClients
from partita.secure_aggregation.fixed_point import FixedPoint, Layout
from partita.secure_aggregation.groups import pair_mask
from partita.secure_aggregation.key_agreement import new_secret, public_key
from partita.secure_aggregation.masks import add_mask
from partita.secure_aggregation.messages import (
    Report,
    Stayed,
    UnmaskedShares,
    read_inbox,
    read_roster,
    read_vector,
    write_inbox,
    write_roster,
)
from partita.secure_aggregation.neighbors import threshold_of
from partita.secure_aggregation.round_setup import RoundSetup
from partita.secure_aggregation.server import SecureServer
from partita.secure_aggregation.signatures import ssh_signer, ssh_verifier


def small_setup(count: int, length: int, settings: SecureAggregation | None = None) -> RoundSetup:
    settings = settings or SecureAggregation()
    layout = Layout((("delta", "a", (length,)),), False)
    return RoundSetup(settings, b"attack", layout, FixedPoint(settings.bits, count, 1.0, 100.0))


def uniformity(vector: Tensor) -> float:
    """The p-value of the hypothesis that the bytes of a vector are uniform."""
    counts = np.bincount(np.frombuffer(vector.numpy().tobytes(), np.uint8), minlength=256)
    return float(chisquare(counts).pvalue)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("bits", [32, 64])
def test_masked_vectors_look_uniform_in_either_of_two_worlds_with_the_same_sum(bits: int) -> None:
    """Worlds that differ in who holds which update: all the server sees are uniform vectors with the same sum."""
    setup = small_setup(3, 20_000, SecureAggregation(bits=bits))  # type: ignore[arg-type]
    zeros, ones = (torch.full((setup.layout.length,), value, dtype=setup.dtype) for value in (0, 1))
    for world in ((zeros, ones, ones), (ones, ones, zeros)):
        server, clients, seen = mask_stage(setup, dict(zip(names(3), world, strict=True)))
        masked = {name: read_vector(data, setup.layout.length, setup.dtype) for name, data in seen.items()}
        assert all(uniformity(vector) > 1e-6 for vector in masked.values())
        # Any two of the three vectors, added or subtracted, are uniform too: only the sum of all is not.
        assert uniformity(masked["c000"] + masked["c001"]) > 1e-6
        assert uniformity(masked["c000"] - masked["c002"]) > 1e-6
        assert uniformity(world[0]) < 1e-6  # the test can tell: in clear, it would have
        confirm_stage(server, clients)
        unmask_stage(server, clients)
        assert torch.equal(server.sum(), sum(world, torch.zeros_like(zeros)))


def test_own_mask_hides_a_vector_that_arrives_after_its_client_was_declared_dropped() -> None:
    """The attack for which each client has a mask of its own: recover its shared masks, then use its late vector."""
    setup = small_setup(4, 20_000)
    vectors = {name: torch.ones(setup.layout.length, dtype=setup.dtype) for name in names(4)}
    server, clients = share_stage(setup, vectors)
    late = clients["c003"].mask(server.present(), vectors["c003"])
    for name in names(3):
        server.add_masked(name, clients[name].mask(server.present(), vectors[name]))
    confirm_stage(server, clients)
    unmask_stage(server, clients)
    total = server.sum()  # recovers the private mask key of c003
    assert torch.equal(total, torch.full_like(total, 3))
    with pytest.raises(ProtocolError, match="after its end"):
        server.add_masked("c003", late)
    secret = server._recover("c003", {name: each.keys for name, each in server._unmasked.items()})
    vector = read_vector(late, setup.layout.length, setup.dtype).clone()
    for peer in names(3):
        add_mask(vector, pair_mask(setup, secret, server.groups.roster[peer].mask_key), 1)
    assert uniformity(vector) > 1e-6


def test_client_never_gives_both_kinds_of_shares_of_one_peer() -> None:
    setup = small_setup(4, 10)
    vectors = {name: torch.ones(setup.layout.length, dtype=setup.dtype) for name in names(4)}
    server, clients, _ = mask_stage(setup, vectors, dropped=["c003"])
    first = clients["c000"].confirm(server.lists())
    assert first == b""
    for other in (("c000", "c001", "c003"), names(4)):  # a list in which another one, or none, dropped out
        with pytest.raises(ProtocolError, match="each stage happens once"):
            clients["c000"].confirm(Stayed(frozenset(names(4)), frozenset(other)).to_bytes(names(4)))
    for name in ("c001", "c002"):
        server.add_confirmed(name, clients[name].confirm(server.lists()))
    server.add_confirmed("c000", first)
    given = UnmaskedShares.from_bytes(clients["c000"].unmask(server.signatures()))
    assert (set(given.seeds), set(given.keys)) == ({"c000", "c001", "c002"}, {"c003"})
    with pytest.raises(ProtocolError, match="its round is over"):
        clients["c000"].unmask(server.signatures())
    # Nor can two parts of the group be told different things: a threshold is more than half of a group.
    for group in range(2, 60):
        assert 2 * threshold_of(SecureAggregation(threshold=0.01, min_clients=2), group) > group


@pytest.mark.parametrize(
    ("shared", "masked", "message"),
    [
        ("0123", "01", "2 clients of the group of c000 sent their vector, and the threshold is"),
        ("0123", "0", "threshold is"),
        ("0123", "123", "says that c000 dropped out"),
        ("012", "012", "says that c003 did not share its keys"),
    ],
)
def test_client_refuses_to_confirm(shared: str, masked: str, message: str) -> None:
    setup = small_setup(4, 10)
    _, clients, _ = mask_stage(setup, {name: torch.ones(12, dtype=setup.dtype) for name in names(4)})
    lists = Stayed(*(frozenset(f"c00{number}" for number in each) for each in (shared, masked)))
    with pytest.raises(ProtocolError, match=message):
        clients["c000"].confirm(lists.to_bytes(names(4)))


def test_client_masks_once_and_only_among_enough_peers() -> None:
    setup = small_setup(4, 10)
    vector = torch.ones(12, dtype=setup.dtype)
    server, clients = share_stage(setup, names(4))
    alone = Stayed(frozenset(["c000"]), frozenset()).to_bytes(names(4))
    with pytest.raises(TooFewClients, match="1 clients of the group of c000 shared their keys"):
        clients["c000"].mask(alone, vector)
    clients["c000"].mask(server.present(), vector)
    with pytest.raises(ProtocolError, match="each stage happens once"):
        clients["c000"].mask(server.present(), vector)
    with pytest.raises(ProtocolError, match="each stage happens once"):
        clients["c001"].share_keys(server.roster())
    with pytest.raises(ProtocolError, match="each stage happens once"):
        clients["c001"].advertise()


def test_shares_that_were_moved_replayed_or_changed_are_reported_and_not_kept() -> None:
    setup = small_setup(4, 10)
    server, others = share_stage(setup, names(4)), share_stage(small_setup(4, 10), names(4))
    inbox, old = (read_inbox(each[0].inbox("c000")) for each in (server, others))
    of_c003 = read_inbox(server[0].inbox("c003"))
    c001 = inbox["c001"]
    changed = {
        "a neighbor's": inbox["c002"],
        "another client's": of_c003["c001"],
        "another round's": old["c001"],
        "nothing": replace(c001, sealed=b""),
        "zeros": replace(c001, sealed=bytes(124)),
        "other hashes": replace(c001, hashes=of_c003["c001"].hashes),
        "another answer": replace(c001, answer=inbox["c002"].answer),
        "another challenge": replace(c001, challenge=bytes(32)),
    }
    for why, parcel in changed.items():
        fresh = SecureClient.from_bytes(setup, states(server)["c000"])
        report = Report.from_bytes(fresh.check(write_inbox({**inbox, "c001": parcel})))
        assert report.wrong == {"c001"}, why
        assert set(fresh._shares) == {"c000", "c002", "c003"}, why
    fresh = SecureClient.from_bytes(setup, states(server)["c000"])
    with pytest.raises(ProtocolError, match="not a neighbor"):
        fresh.check(write_inbox({**inbox, "spy": c001}))
    assert Report.from_bytes(fresh.check(write_inbox(inbox))).wrong == set()


def states(shared: tuple[SecureServer, dict[str, SecureClient]]) -> dict[str, bytes]:
    """The clients as they were before they checked their shares."""
    for client in shared[1].values():
        client.stage = SHARED
        client._shares = {client.name: client._shares[client.name]}
    return {name: client.to_bytes() for name, client in shared[1].items()}


def test_clients_with_other_settings_or_rounds_cannot_take_part() -> None:
    one, other = setup_for(4), setup_for(4, round_id=b"run/1")
    server = SecureServer(one)
    clients = {name: SecureClient(other if name == "c003" else one, name) for name in names(4)}
    for name, client in clients.items():
        server.add_advertisement(name, client.advertise())
    for name, client in clients.items():
        shares = client.share_keys(server.roster())
        if name != "c003":
            server.add_shares(name, shares)
    with pytest.raises(ProtocolError, match="c003 shares other secrets than those of its public keys"):
        server.add_shares("c003", shares)


def test_roster_must_hold_own_keys_and_distinct_ones() -> None:
    setup = setup_for(3)
    server, clients = SecureServer(setup), {name: SecureClient(setup, name) for name in names(3)}
    for name, client in clients.items():
        server.add_advertisement(name, client.advertise())
    roster = read_roster(server.roster())
    foreign = replace(roster["c000"], mask_key=public_point(new_number()))
    copied = replace(roster["c001"], mask_key=roster["c002"].mask_key)
    with pytest.raises(ProtocolError, match="does not have the keys that c000 advertised"):
        clients["c000"].share_keys(write_roster({**roster, "c000": foreign}))
    with pytest.raises(ProtocolError, match="two public keys of a roster are equal"):
        clients["c000"].share_keys(write_roster({**roster, "c001": copied}))
    zero = replace(roster["c001"], cipher_key=bytes(32))  # a point of low order
    with pytest.raises(ProtocolError, match="not a valid X25519 key"):
        clients["c000"].share_keys(write_roster({**roster, "c001": zero}))
    spies = {name: replace(foreign, client=name, cipher_key=public_key(new_secret())) for name in ("spy",)}
    with pytest.raises(ProtocolError, match="room for 3"):
        clients["c000"].share_keys(write_roster({**roster, **spies}))


@pytest.mark.parametrize("kind", ["ed25519", "p384"])
def test_signed_keys_stop_a_server_that_lies_about_keys(kind: str, tmp_path: Path) -> None:
    setup = setup_for(3)
    verify = ssh_verifier(write_ssh_keys(tmp_path, names(3), kind))
    server, clients = SecureServer(setup), {name: SecureClient(setup, name) for name in names(3)}
    for name, client in clients.items():
        server.add_advertisement(name, client.advertise(ssh_signer(tmp_path / name)))
    roster = read_roster(server.roster())
    lie = replace(roster["c001"], cipher_key=public_key(new_secret()))
    for bad in (lie, replace(lie, signature=b""), replace(lie, signature=roster["c002"].signature)):
        with pytest.raises(ProtocolError, match="keys of c001 in the roster are not signed by it"):
            clients["c000"].share_keys(write_roster({**roster, "c001": bad}), verify)
    stranger = replace(lie, client="spy", mask_key=public_point(new_number()))
    without = {name: each for name, each in roster.items() if name != "c002"}
    with pytest.raises(ProtocolError, match="keys of spy"):
        clients["c000"].share_keys(write_roster({**without, "spy": stranger}), verify)
    for name, client in clients.items():
        server.add_shares(name, client.share_keys(server.roster(), verify))


def test_unusable_long_term_keys_are_named(tmp_path: Path) -> None:
    public = write_ssh_keys(tmp_path, ["a", "b"], "ed25519")
    other = write_ssh_keys(tmp_path, ["small"], "p256")
    for wrong in ("", "ssh-ed25519 AAAA", "hello", *other.values()):
        with pytest.raises(ProtocolError, match="signers: the key of b is not an SSH key"):
            ssh_verifier({**public, "b": wrong})
    with pytest.raises(ProtocolError, match="a and b have the same key"):
        ssh_verifier(dict.fromkeys(public, public["a"]))
    (tmp_path / "text").write_text("hello")
    for name, text in (("text", "cannot be read"), ("missing", "cannot be read"), ("small", "is not an SSH key")):
        with pytest.raises(ProtocolError, match=text):
            ssh_signer(tmp_path / name)


def test_same_vector_has_another_mask_in_every_round() -> None:
    setup = setup_for(3)
    vectors = {name: torch.zeros(setup.layout.length, dtype=setup.dtype) for name in names(3)}
    rounds = [mask_stage(setup, vectors)[2]["c000"] for _ in range(2)]
    assert rounds[0] != rounds[1]
    assert torch.equal(run_protocol(setup, vectors).sum(), vectors["c000"])
