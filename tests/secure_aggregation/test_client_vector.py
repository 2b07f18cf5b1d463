"""Noise at the clients: what the sum carries, what is never released, and what a client sends."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from helpers import toy_model, toy_run
from secure_fixtures import names, run_protocol
from torch import Tensor

from partita.core.client_noise import ClientNoise
from partita.core.client_rule import PrivacyRelease
from partita.core.dp_settings import PrivacyError, PrivacySettings
from partita.core.rng import Key
from partita.core.secure_settings import SecureAggregation
from partita.core.settings import Run, RunError
from partita.core.update import Update
from partita.methods.fedavg import fedavg
from partita.methods.fedpart import fedpart
from partita.privacy.accountant import epsilon
from partita.privacy.client_level import ClippedUpdates
from partita.privacy.guard import (
    count_values,
    effective_noise,
    make_private,
    protect_at_clients,
)
from partita.secure_aggregation.client_vector import (
    add_noise,
    bound_norm,
    check_room,
    client_vector,
)
from partita.secure_aggregation.eligibility import fixed_point_of
from partita.secure_aggregation.encoding import TooFewClients
from partita.secure_aggregation.fixed_point import NUMBERS, FixedPoint, Layout
from partita.secure_aggregation.neighbors import colluding_clients, count_neighbors
from partita.secure_aggregation.round_setup import RoundSetup

VALUES = 20_000
LAYOUT = Layout((("delta", "w", (VALUES,)),), False)
SETTINGS = SecureAggregation(collusion=0.0)
COARSE = SecureAggregation(bits=32, max_value=5e6, collusion=0.0)  # a grid of 64 points per unit for four clients


def noisy_run(cohort: int, settings: SecureAggregation = SETTINGS, noise: float = 2.0, clip: float = 0.5) -> Run:
    run = replace(toy_run(fedavg(), 3), secure_aggregation=settings, secret=Key(99))
    return protect_at_clients(run, cohort, clip, noise)


def setup_of(run: Run, cohort: int, round_id: bytes = b"run/0") -> RoundSetup:
    assert run.secure_aggregation is not None
    return RoundSetup(run.secure_aggregation, round_id, LAYOUT, fixed_point_of(run, cohort))


def clipped_update(client: str, number: int = 0, clip: float = 0.5) -> Update:
    values = torch.randn(VALUES, generator=torch.Generator().manual_seed(0))
    update = Update(client, {"w": 100 * values}, {}, 7.0, {"w": 1}, 1.0, round=number)
    return ClippedUpdates(clip, 0.0, 3).encode(update, {}, Key(0))[0]


def noise_of(run: Run, setup: RoundSetup, client: str, number: int = 0) -> Tensor:
    """The noise in a client's vector, in grid points."""
    update = clipped_update(client, number)
    return (client_vector(run, setup, update) - setup.fixed_point.encode(update, setup.layout))[NUMBERS:]


# ---- what the sum carries


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("collusion", "lost"), [(0.0, 0), (0.0, 3), (0.2, 0), (0.2, 3)])
def test_sum_carries_the_noise_that_is_charged_down_to_the_threshold(collusion: float, lost: int) -> None:
    """Of ten clients seven must stay. The noise of two that may collude does not count."""
    cohort, noise, clip = 10, 2.0, 0.5
    run = noisy_run(cohort, SecureAggregation(collusion=collusion))
    setup, clients = setup_of(run, cohort), names(cohort)
    assert run.client_noise is not None
    assert run.client_noise.honest == 7 - round(collusion * cohort)
    vectors = {client: client_vector(run, setup, clipped_update(client)) for client in clients}
    server = run_protocol(setup, vectors, dropped=clients[:lost])
    clean = sum(setup.fixed_point.encode(clipped_update(client), LAYOUT) for client in server.survivors)
    drawn = (server.sum() - clean)[NUMBERS:].double() / setup.fixed_point.scale
    assert len(server.survivors) == cohort - lost
    wanted = noise * clip * math.sqrt((cohort - lost) / run.client_noise.honest)
    assert float(drawn.std()) == pytest.approx(wanted, rel=4 / math.sqrt(2 * VALUES))
    assert abs(float(drawn.mean())) < 5 * wanted / math.sqrt(VALUES)
    if (collusion, lost) == (0.2, 3):
        colluding = sum(noise_of(run, setup, client) for client in server.survivors[:2])
        rest = drawn - colluding.double() / setup.fixed_point.scale
        assert float(rest.std()) == pytest.approx(noise * clip, rel=4 / math.sqrt(2 * VALUES)), "what the rest carries"
    assert (server.sum() - clean)[:NUMBERS].tolist() == [0, 0], "the number of clients has no noise"


@pytest.mark.slow
def test_below_the_threshold_nothing_is_released() -> None:
    cohort, clients = 10, names(10)
    run = noisy_run(cohort)
    setup = setup_of(run, cohort)
    vectors = {client: client_vector(run, setup, clipped_update(client)) for client in clients}
    with pytest.raises(TooFewClients, match="6 of 10 clients sent their vector"):
        run_protocol(setup, vectors, dropped=clients[:4])
    server = run_protocol(setup, vectors, silent=clients[:4])
    with pytest.raises(TooFewClients, match="6 clients sent a share"):
        server.sum()


def test_clients_that_are_missing_from_the_start_do_not_lower_the_threshold() -> None:
    """A share of the clients that are there would: of six, the protocol alone asks for four, and their noise is small.

    The clients refuse by themselves, whatever the server does.
    """
    cohort = 10
    run, few = noisy_run(cohort), names(6)
    assert run.secure_aggregation is not None
    assert run.client_noise is not None
    assert run.secure_aggregation.min_clients == run.client_noise.honest == 7, "one number for both"
    vectors = {client: torch.zeros(LAYOUT.length, dtype=torch.int64) for client in few}
    with pytest.raises(TooFewClients, match="min_clients is 7"):
        run_protocol(setup_of(run, cohort), vectors)
    unpinned = replace(run, secure_aggregation=SETTINGS)
    assert run_protocol(setup_of(unpinned, cohort), vectors, dropped=few[:2]).sum() is not None, "the attack"


# ---- what a client sends


def test_noise_depends_on_client_round_session_and_secret() -> None:
    run = noisy_run(5)
    setup = setup_of(run, 5)
    base = noise_of(run, setup, "c001")
    assert torch.equal(base, noise_of(run, setup, "c001")), "a resumed run draws the same"
    again = clipped_update("c001")
    named = [client_vector(run, each, again, "simulation") for each in (setup, setup_of(run, 5, b"run/1"))]
    assert torch.equal(*named), "a simulation resumes exactly"
    others = [
        (named[0] - setup.fixed_point.encode(again, LAYOUT))[NUMBERS:],
        noise_of(run, setup, "c002"),
        noise_of(run, setup, "c001", 1),
        noise_of(run, setup_of(run, 5, b"run/1"), "c001"),
        noise_of(replace(run, secret=Key(98)), setup, "c001"),
        noise_of(replace(run, secret=None), setup, "c001"),
    ]
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack([base.double(), other.double()]))[0, 1])) < 0.05


def test_integers_respect_the_clip_whatever_float32_did() -> None:
    limit = 1000.0
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        values = torch.randint(-(2**40), 2**40, (500,), generator=draw)
        bounded = bound_norm(values, limit)
        assert math.isqrt(sum(int(value) ** 2 for value in bounded)) < limit
        assert float(bounded.double().norm()) > 0.95 * limit
    short = torch.tensor([3, -4])
    assert bound_norm(short, 5.1) is short
    assert int((bound_norm(short, 5.0) ** 2).sum()) <= 25
    assert bound_norm(torch.zeros(0, dtype=torch.int64), 1.0).shape == (0,)


def test_rounding_is_not_clipped_again() -> None:
    """The bound on the integers includes the rounding that is charged."""
    client_noise, fixed_point = ClientNoise(1.0, 1.0, 1), FixedPoint(32, 1, 1.0, 2.0**25)
    assert fixed_point.scale == 32.0
    values = torch.full((1024,), 1, dtype=torch.int32)  # of norm 32, the clip; rounded up, they can have norm 48
    values[:200] = 2
    limit = 32 + math.sqrt(1024) / 2
    assert 32 < float(values.double().norm()) < limit
    runs = [add_noise(each, client_noise, fixed_point, Key(1)) for each in (values, torch.zeros_like(values))]
    assert torch.equal(runs[0] - runs[1], values)


def test_update_of_a_dishonest_transform_is_bounded_before_the_noise() -> None:
    run = noisy_run(5)
    setup, update = setup_of(run, 5), clipped_update("c000")
    longer = replace(update, delta={"w": 50 * update.delta["w"]})
    shift = (client_vector(run, setup, longer) - client_vector(run, setup, update))[NUMBERS:]
    most = 2 * (0.5 * setup.fixed_point.scale + math.sqrt(VALUES) / 2)
    assert float(shift.double().norm()) <= most


@pytest.mark.parametrize("bits", [32, 64])
def test_noise_wraps_around_in_the_type_of_the_vector(bits: int) -> None:
    run = noisy_run(5, SecureAggregation(bits=bits, collusion=0.0))  # type: ignore[arg-type]
    setup = setup_of(run, 5)
    vector = client_vector(run, setup, clipped_update("c000"))
    assert vector.dtype == setup.dtype
    std = float(noise_of(run, setup, "c000").double().std()) / setup.fixed_point.scale
    assert std == pytest.approx(2.0 * 0.5 / math.sqrt(4), rel=0.03)


def test_update_that_tells_more_than_its_values_is_refused() -> None:
    run = noisy_run(5)
    setup = setup_of(run, 5)
    for update, layout in (
        (replace(clipped_update("c000"), weight=0.5), LAYOUT),
        (replace(clipped_update("c000"), loss=1.0), replace(LAYOUT, with_loss=True)),
        (replace(clipped_update("c000"), round=None), LAYOUT),
    ):
        with pytest.raises(PrivacyError, match="names its round and has weight 1 and no loss"):
            client_vector(run, replace(setup, layout=layout), update)


def test_run_without_client_noise_sends_its_plain_vector() -> None:
    run = replace(toy_run(fedavg(), 3), secure_aggregation=SETTINGS)
    setup, update = setup_of(run, 5), clipped_update("c000")
    assert torch.equal(client_vector(run, setup, update), setup.fixed_point.encode(update, LAYOUT))


def test_noise_that_would_wrap_around_is_refused() -> None:
    with pytest.raises(PrivacyError, match=r"max_value is 1, but clipped values and noise need 21; raise it"):
        check_room(ClientNoise(1.0, 2.0, 1), FixedPoint(64, 1, 1.0, 1.0))
    check_room(ClientNoise(1.0, 2.0, 4), FixedPoint(64, 4, 1.0, 6.0))
    with pytest.raises(PrivacyError, match="max_value is 1"):
        noisy_run(5, SecureAggregation(max_value=1.0, collusion=0.0))


def test_noise_at_clients_needs_secure_aggregation() -> None:
    with pytest.raises(RunError, match="only enough in a sum, and secure aggregation is off"):
        replace(toy_run(fedavg(), 3), client_noise=ClientNoise(1.0, 1.0, 3))


def test_collusion_of_all_is_refused() -> None:
    with pytest.raises(TooFewClients, match="split a round of 5 clients if 4 must stay, and 4 may collude"):
        noisy_run(5, SecureAggregation(collusion=0.9))


# ---- accounting


@pytest.mark.parametrize("settings", [SETTINGS, COARSE], ids=["fine grid", "coarse grid"])
def test_each_client_is_charged_for_the_rounds_in_which_it_was_asked(settings: SecureAggregation) -> None:
    run = toy_run(fedavg(), 4, cohort=4, secure_aggregation=settings)
    sizes = {f"c{number}": 8 for number in range(6)}
    guard = make_private(run, toy_model(), sizes, PrivacySettings("client", noise=3.0))
    assert (guard.account.by, guard.run.hidden_cohorts, guard.run.drift) == ("rdp", False, False)
    assert guard.run.client_noise == ClientNoise(1.0, 3.0, 3)
    assert guard.run.method.transforms[0] == ClippedUpdates(1.0, 0.0, 4), "the server adds no noise"
    guard.charge(0, ["c0", "c1", "c2", "c3"], {})
    guard.charge(1, ["c0", "c2", "c4", "c5"], {}, population=6)
    assert {client: sum(bill.values()) for client, bill in guard.account.bills.items()} == {
        "c0": 2, "c1": 1, "c2": 2, "c3": 1, "c4": 1, "c5": 1,
    }  # fmt: skip
    scale = fixed_point_of(guard.run, 4).scale
    worth = effective_noise(ClientNoise(1.0, 3.0, 3), scale, count_values(guard.run, toy_model()))
    by_hand = epsilon({PrivacyRelease("training", worth, 1.0): 2}, guard.account.delta, "rdp", of_clients=True)
    assert guard.spent() == pytest.approx(by_hand)
    assert (worth < 2.9) is (settings is COARSE), "rounding to a coarse grid is charged"
    assert guard.planned == guard.forecast(4).epsilon()
    assert guard.about()["noise_added"] == "at the clients, before secure aggregation; the server is not trusted"
    assert (guard.about()["sampling"], guard.about()["unit"]) == ("known cohort", "client")


def test_noise_for_a_budget_is_found() -> None:
    run = toy_run(fedavg(), 4, cohort=4, secure_aggregation=SETTINGS)
    sizes = {f"c{number}": 8 for number in range(6)}
    guard = make_private(run, toy_model(), sizes, PrivacySettings("client", epsilon=5.0))
    assert guard.planned is not None
    assert 4.9 < guard.planned <= 5.0
    coarse = replace(run, secure_aggregation=SecureAggregation(bits=32, collusion=0.0, max_value=1000.0))
    rough = make_private(coarse, toy_model(), sizes, PrivacySettings("client", epsilon=5.0))
    assert rough.run.client_noise is not None
    assert guard.run.client_noise is not None
    assert rough.run.client_noise.noise >= guard.run.client_noise.noise
    with pytest.raises(PrivacyError, match="only 'rdp' bounds"):
        make_private(run, toy_model(), sizes, PrivacySettings("client", noise=3.0, accountant="pld"))


def test_without_noise_epsilon_is_infinite() -> None:
    run = toy_run(fedavg(), 2, cohort=4, secure_aggregation=SETTINGS)
    guard = make_private(run, toy_model(), {f"c{n}": 8 for n in range(6)}, PrivacySettings("client", noise=0.0))
    assert guard.planned == math.inf
    assert guard.run.client_noise is None


def test_colluding_clients_of_the_whole_round_do_not_count() -> None:
    """Also in a sparse graph: those that sign a sum are all in it, and a server can choose who else is."""
    settings = SecureAggregation()
    assert [colluding_clients(settings, cohort) for cohort in (3, 6, 10, 20, 1000)] == [1, 1, 2, 4, 200]
    assert colluding_clients(replace(settings, collusion=0.0), 1000) == 0
    assert count_neighbors(settings, 1000) < 999
    run = noisy_run(1000, settings)
    assert run.client_noise is not None
    assert run.secure_aggregation is not None
    assert run.client_noise.honest == run.secure_aggregation.min_clients - 200 == 460


def test_values_are_counted_from_above() -> None:
    model = toy_model()
    size = sum(value.numel() for value in model.initial.values())
    assert count_values(toy_run(fedavg()), model) == size
    assert count_values(toy_run(fedpart()), model) == size
    assert Fraction(effective_noise(ClientNoise(1.0, 1.0, 3), 2.0**20, size)) < 1
