from __future__ import annotations

import pytest
import torch
from secure_fixtures import (
    SORTED,
    check_stage,
    confirm_stage,
    mask_stage,
    names,
    random_update,
    random_vector,
    run_protocol,
    setup_for,
    share_stage,
    unmask_stage,
)
from torch import Tensor

from partita.core.secure_settings import SecureAggregation
from partita.secure_aggregation.client import SecureClient
from partita.secure_aggregation.encoding import ProtocolError, TooFewClients
from partita.secure_aggregation.messages import (
    Report,
    Stayed,
    UnmaskedShares,
    read_inbox,
    read_roster,
    read_signatures,
    write_roster,
    write_signatures,
    write_vector,
)
from partita.secure_aggregation.round_setup import RoundSetup
from partita.secure_aggregation.server import SecureServer


def vectors_of(setup: RoundSetup, count: int) -> dict[str, Tensor]:
    return {name: random_vector(setup, place) for place, name in enumerate(names(count))}


def clear_sum(vectors: dict[str, Tensor], dropped: list[str]) -> Tensor:
    kept = [vector for name, vector in vectors.items() if name not in dropped]
    return torch.stack(kept).sum(0, dtype=kept[0].dtype)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize(
    ("count", "gone", "neighbors"),
    [(3, 0, "auto"), (3, 1, "auto"), (10, 3, "auto"), (12, 2, 6), (16, 2, 8), (9, 0, 4)],
)
def test_sum_equals_the_sum_in_clear_modulo_2_to_the_bits(bits: int, count: int, gone: int, neighbors: object) -> None:
    setup = setup_for(count, SecureAggregation(bits=bits, neighbors=neighbors, min_clients=2, collusion=0.0))  # type: ignore
    vectors = vectors_of(setup, count)
    for first in range(2):  # at random places of the circle
        dropped = names(count)[first : first + gone] if first + gone <= count else []
        try:
            total = run_protocol(setup, vectors, dropped).sum()
        except TooFewClients:
            assert neighbors != "auto"  # in a sparse graph, dropouts may fall into one group
            continue
        assert torch.equal(total, clear_sum(vectors, dropped))


def test_one_dropout_more_than_the_threshold_allows_ends_the_round() -> None:
    setup = setup_for(10)  # threshold 7 of 10
    vectors = vectors_of(setup, 10)
    assert torch.equal(run_protocol(setup, vectors, names(10)[:3]).sum(), clear_sum(vectors, names(10)[:3]))
    with pytest.raises(TooFewClients, match=r"6 of 10 clients sent their vector.*threshold is 7"):
        run_protocol(setup, vectors, names(10)[:4])


@pytest.mark.slow
def test_dropouts_while_unmasking_are_survivors_of_the_sum() -> None:
    setup = setup_for(10)
    vectors = vectors_of(setup, 10)
    server = run_protocol(setup, vectors, dropped=["c000"], silent=["c001", "c002"])
    assert torch.equal(server.sum(), clear_sum(vectors, ["c000"]))
    assert "c001" in server.survivors
    with pytest.raises(TooFewClients, match="6 clients sent a share of the secret of c001, and the threshold is 7"):
        run_protocol(setup, vectors, dropped=["c000"], silent=["c001", "c002", "c003"]).sum()


def test_clients_that_leave_before_sharing_keys_cost_no_recovery() -> None:
    setup = setup_for(6, SecureAggregation(threshold=0.5, collusion=0.0))
    server, clients = SecureServer(setup), {name: SecureClient(setup, name) for name in names(6)}
    for name, client in clients.items():
        server.add_advertisement(name, client.advertise())
    present = names(6)[:5]
    for name in present:
        server.add_shares(name, clients[name].share_keys(server.roster()))
    vectors = vectors_of(setup, 6)
    check_stage(server, {name: clients[name] for name in present})
    for name in present:
        server.add_masked(name, clients[name].mask(server.present(), vectors[name]))
    confirm_stage(server, clients)
    unmask_stage(server, clients)
    assert server.dropped == ()
    assert torch.equal(server.sum(), clear_sum(vectors, ["c005"]))


@pytest.mark.slow
def test_results_do_not_depend_on_the_secrets() -> None:
    setup = setup_for(5)
    vectors = vectors_of(setup, 5)
    first, second = (mask_stage(setup, vectors) for _ in range(2))
    assert all(first[2][name] != second[2][name] for name in vectors)  # new masks
    assert torch.equal(run_protocol(setup, vectors).sum(), run_protocol(setup, vectors).sum())


def test_weighted_mean_of_updates_equals_the_clear_one_within_the_resolution() -> None:
    setup = setup_for(5)
    updates = {name: random_update(name, place, weight=10.0 * (place + 1)) for place, name in enumerate(names(5))}
    vectors = {name: setup.fixed_point.encode(update, SORTED) for name, update in updates.items()}
    server = run_protocol(setup, vectors, dropped=["c004"])
    mean = setup.fixed_point.decode(server.sum(), SORTED, 4)
    kept = [updates[name] for name in names(4)]
    weight = sum(update.weight for update in kept)
    assert mean.weight == weight
    assert mean.loss == pytest.approx(sum(u.weight * (u.loss or 0) for u in kept) / weight, abs=mean.resolution)
    for part, of in ((mean.aggregate.delta, "delta"), (mean.aggregate.slots["control"], "control")):
        for name, value in part.items():
            each = [(u.delta if of == "delta" else u.slots[of])[name].double() * u.weight for u in kept]
            exact = torch.stack(each).sum(0) / weight
            assert float((value - exact).abs().max()) <= mean.resolution
    assert mean.aggregate.cohort == 4


def test_a_client_continues_in_another_process_after_every_stage() -> None:
    setup = setup_for(4)
    vectors = vectors_of(setup, 4)
    server, states = SecureServer(setup), {name: SecureClient(setup, name).to_bytes() for name in names(4)}

    def wake(name: str) -> SecureClient:
        return SecureClient.from_bytes(setup_for(4), states[name])  # an equal setup, built again

    for name in names(4):
        client = wake(name)
        server.add_advertisement(name, client.advertise())
        states[name] = client.to_bytes()
    for name in names(4):
        client = wake(name)
        server.add_shares(name, client.share_keys(server.roster()))
        states[name] = client.to_bytes()
    for name in names(4):
        client = wake(name)
        server.add_checked(name, client.check(server.inbox(name)))
        states[name] = client.to_bytes()
    for name in names(4):
        client = wake(name)
        server.add_masked(name, client.mask(server.present(), vectors[name]))
        states[name] = client.to_bytes()
    for name in names(4):
        client = wake(name)
        server.add_confirmed(name, client.confirm(server.lists()))
        states[name] = client.to_bytes()
    for name in names(4):
        client = wake(name)
        server.add_unmasked(name, client.unmask(server.signatures()))
        states[name] = client.to_bytes()
    assert torch.equal(server.sum(), clear_sum(vectors, []))
    with pytest.raises(ProtocolError, match="its round is over"):
        wake("c000").unmask(server.signatures())
    with pytest.raises(ProtocolError, match="not of this round"):
        SecureClient.from_bytes(setup_for(4, round_id=b"run/1"), states["c000"])


def test_server_counts_the_bytes_of_every_message() -> None:
    setup = setup_for(3)
    vectors = vectors_of(setup, 3)
    server, clients, seen = mask_stage(setup, vectors)
    confirm_stage(server, clients)
    unmasked = {name: clients[name].unmask(server.signatures()) for name in vectors}
    for name, message in unmasked.items():
        server.add_unmasked(name, message)
    assert server.up["mask"] == sum(map(len, seen.values()))
    assert server.up["unmask"] == sum(map(len, unmasked.values()))
    roster = server.down["advertise"] // 3
    assert server.down["advertise"] == 3 * len(server.roster()) == 3 * roster
    assert server.up["advertise"] == roster + 4  # the kind and version of three messages instead of one
    dealt = 2 + 2 * 4 + 33 + 3 * 32 + 3 * (3 * 4 + 4 + 96) + 2 * 124  # a proof, and three records with two letters
    assert server.up["share_keys"] == 3 * dealt
    assert server.down["share_keys"] == 3 * (2 + 2 * (5 * 4 + 4 + 96 + 2 * 32 + 124))
    assert server.up["check"] == 3 * (2 + 4)  # nobody is reported
    assert server.down["check"] == server.down["mask"] == 3 * (2 + 4 + 3)  # a byte for each client
    assert (server.up["confirm"], server.down["confirm"]) == (0, 3 * (2 + 3 * 4))  # no signatures, in three fields


def test_bad_bytes_are_a_clear_error_at_every_stage() -> None:
    setup = setup_for(3)
    vectors = vectors_of(setup, 3)
    good = SecureClient(setup, "c000").advertise()
    for bad in (b"", b"A", b"A\x01\xff\xff\xff\xff", good[:-1], good + b"\x00", good[:20] + good[30:], b"B" + good):
        with pytest.raises(ProtocolError):
            SecureServer(setup).add_advertisement("c000", bad)
    server, clients = share_stage(setup, vectors)
    for bad in (b"", b"E\x01\x01", b"\x80\x04pickle", bytes(1000), b"\xff" * 1000):
        for read in (
            lambda data: clients["c000"].mask(data, vectors["c000"]),
            lambda data: server.add_masked("c000", data),
            read_roster,
            read_inbox,
            Report.from_bytes,
            lambda data: Stayed.from_bytes(data, names(3)),
            lambda data: read_signatures(data, names(3)),
            UnmaskedShares.from_bytes,
            lambda data: SecureClient.from_bytes(setup, data),
        ):
            with pytest.raises(ProtocolError):
                read(bad)
    for wrong in (torch.zeros(3, dtype=torch.int64), torch.zeros(setup.layout.length)):
        with pytest.raises(ProtocolError, match="the vector is"):
            clients["c000"].mask(server.present(), wrong)
        with pytest.raises(ProtocolError, match="a masked vector is"):
            server.add_masked("c000", write_vector(wrong))


def test_server_refuses_repeated_late_and_foreign_messages() -> None:
    setup = setup_for(4)
    server, clients = SecureServer(setup), {name: SecureClient(setup, name) for name in names(4)}
    messages = {name: client.advertise() for name, client in clients.items()}
    server.add_advertisement("c000", messages["c000"])
    with pytest.raises(ProtocolError, match="twice"):
        server.add_advertisement("c000", messages["c000"])
    with pytest.raises(ProtocolError, match="in the name of c000"):
        server.add_advertisement("c001", messages["c000"])
    for name in names(3)[1:]:
        server.add_advertisement(name, messages[name])
    roster = server.roster()
    with pytest.raises(ProtocolError, match="after its end"):
        server.add_advertisement("c003", messages["c003"])
    shares = clients["c000"].share_keys(roster)
    with pytest.raises(ProtocolError, match="not in the roster"):
        server.add_shares("c003", shares)
    server.add_shares("c000", shares)
    with pytest.raises(ProtocolError, match="without having shared"):
        server.add_masked("c001", b"")


def test_a_wrong_share_is_an_error_of_its_sender_and_not_used() -> None:
    setup = setup_for(4)
    vectors = vectors_of(setup, 4)
    for dropped in ([], ["c003"]):
        server, clients, _ = mask_stage(setup, vectors, dropped)
        confirm_stage(server, clients)
        for name in server.survivors:
            answer = UnmaskedShares.from_bytes(clients[name].unmask(server.signatures()))
            if name == "c000" and not dropped:
                answer = UnmaskedShares({peer: bytes(31) + b"\x07" for peer in answer.seeds}, answer.keys)
                with pytest.raises(ProtocolError, match="c000 sent a wrong share of the secret of c000, or none"):
                    server.add_unmasked(name, answer.to_bytes())
            else:
                server.add_unmasked(name, answer.to_bytes())
        assert torch.equal(server.sum(), clear_sum(vectors, dropped))


def test_messages_survive_a_round_trip() -> None:
    stayed = Stayed(frozenset("abc"), frozenset("ab"))
    assert Stayed.from_bytes(stayed.to_bytes("dcba"), "abcd") == stayed
    assert read_signatures(write_signatures({"b": b"1"}, "ba"), "ab") == {"a": b"", "b": b"1"}
    server, _ = share_stage(setup_for(3), names(3))
    roster = server.roster()
    assert write_roster(read_roster(roster)) == roster
