"""Secure aggregation in the engines of one machine: the same run as in clear, within the resolution."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

import pytest
import torch
from helpers import Clients, ScriptedEngine, ServerMomentum, toy_model, toy_run, with_federation

from partita.core import serialization, tensors
from partita.core.client import ClientError, Job
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.plan import Plan, RoundInfo, share
from partita.core.rounds import Engine, RoundResult, rounds
from partita.core.sampling import Uniform
from partita.core.secure_settings import SecureAggregation
from partita.core.server_rule import ServerRule
from partita.core.settings import Run, RunError
from partita.core.tensors import Tensors
from partita.core.update import MaskedUpdate, SecureSum, Update
from partita.engines import secure
from partita.engines.availability import Availability
from partita.engines.multiprocess import MultiprocessEngine
from partita.engines.secure import SecureEngine
from partita.engines.simulation import SimulationEngine
from partita.methods import build
from partita.privacy.client_level import protect_clients
from partita.secure_aggregation.server import SecureServer

CLIENTS = Clients(c0=3, c1=9, c2=12, c3=6, c4=5)
SETTINGS = SecureAggregation(threshold=0.5, collusion=0.0)


def secured(run: Run) -> Run:
    return replace(run, drift=False, secure_aggregation=SETTINGS)


def play_secure(run: Run, block: int = 1, availability: Availability | None = None) -> list[RoundResult]:
    inner = SimulationEngine(run, toy_model(), CLIENTS, block, availability=availability)
    return list(rounds(run, toy_model(), SecureEngine(inner, run, toy_model())))


def play_clear(run: Run, availability: Availability | None = None) -> list[RoundResult]:
    inner = SimulationEngine(run, toy_model(), CLIENTS, availability=availability)
    return list(rounds(run, toy_model(), inner))


def distance(one: Tensors, other: Tensors) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["fedavg", "fedadam", "fedper", "fedprox", "fedpart"])
@pytest.mark.parametrize("block", [1, 3])
def test_run_equals_the_run_in_clear_within_the_resolution(name: str, block: int) -> None:
    run = toy_run(build(name), count=3)
    clear, masked = play_clear(run), play_secure(secured(run), block)
    for one, other in zip(clear, masked, strict=True):
        assert other.secure is not None
        # The mean in clear is rounded to float32 in every step, and fedadam divides by small numbers.
        rounding = 1e-4 if name == "fedadam" else 1e-6
        assert distance(one.server.params, other.server.params) < other.secure["resolution"] + rounding
        assert other.loss == pytest.approx(one.loss, abs=1e-5)
        assert other.sent == one.sent
        assert (other.drift, other.norms, other.losses, other.metrics) == ({}, {}, {}, {})
        assert other.secure["off"]


def test_first_mean_equals_the_exact_mean_within_the_resolution() -> None:
    """Against float64, without the rounding of the mean in clear."""
    run, model = secured(toy_run(build("fedavg"), count=1)), toy_model()
    inner = SimulationEngine(run, model, CLIENTS)
    updates: list[Update] = []

    class Kept:
        clients, evaluate = inner.clients, inner.evaluate

        def train(self, jobs: Iterable[Job]) -> Iterator[object]:
            for reply in inner.train(jobs):
                assert isinstance(reply, Update)
                updates.append(reply)
                yield reply

    [result] = rounds(run, model, SecureEngine(Kept(), run, model))  # type: ignore[arg-type]
    assert result.secure is not None
    total = sum(update.weight for update in updates)
    for name, value in result.server.params.items():
        mean = sum((update.delta[name].double() * update.weight for update in updates), torch.zeros(1)) / total
        exact = (model.initial[name].double() + mean).float()
        assert float((value - exact).abs().max()) <= result.secure["resolution"] + 1e-6


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("gone", [["c0"], ["c1", "c4"]])
def test_dropouts_below_the_threshold_are_recovered(gone: list[str]) -> None:
    trace = Availability(trace={(0, client): 0.0 for client in gone})
    run = toy_run(build("fedavg"), count=1)
    [clear], [masked] = play_clear(run, trace), play_secure(secured(run), availability=trace)
    assert masked.secure is not None
    assert distance(clear.server.params, masked.server.params) < 1e-6
    assert [lost.client for lost in masked.lost] == gone
    assert masked.secure["clients"] == 5 - len(gone)
    assert masked.secure["recovered"] == len(gone)


def test_dropouts_above_the_threshold_end_the_run_and_name_it() -> None:
    trace = Availability(trace={(0, client): 0.0 for client in ("c0", "c1", "c2")})
    run = secured(toy_run(build("fedavg"), count=1))
    with pytest.raises(RunError, match=r"cannot be unmasked: 2 of 5 clients sent their vector.*the threshold is 3"):
        play_secure(run, availability=trace)
    with pytest.raises(RunError, match="the threshold is 3"):  # as in clear: missing clients are an error
        play_secure(with_federation(run, skip_failed_clients=True), availability=trace)
    everyone = Availability(client_dropout=1.0)
    with pytest.raises(RunError, match="no client sent a vector"):
        play_secure(run, availability=everyone)


def test_a_wrong_share_costs_no_round_and_names_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    received = SecureServer.add_unmasked

    def lie(self: SecureServer, client: str, data: bytes) -> None:
        received(self, client, data[:-1] + bytes([data[-1] ^ 1]) if client == "c0" else data)

    run = secured(toy_run(build("fedavg"), count=1))
    [expected] = play_secure(run)
    monkeypatch.setattr(SecureServer, "add_unmasked", lie)
    with pytest.raises(ClientError, match="c0 sent a wrong share of the secret of c4"):
        play_secure(run)
    [result] = play_secure(with_federation(run, skip_failed_clients=True))
    assert result.skipped is None
    assert tensors.equal(result.server.params, expected.server.params)


def test_value_out_of_range_is_the_clients_error() -> None:
    tight = replace(secured(toy_run(build("fedavg"), count=1)), secure_aggregation=SecureAggregation(max_value=1e-6))
    with pytest.raises(ClientError, match=r"c\d.*secure_aggregation\.max_value"):
        play_secure(tight)
    with pytest.raises(RunError, match=r"cannot be unmasked.*secure_aggregation\.max_value"):
        play_secure(with_federation(tight, skip_failed_clients=True))


@pytest.mark.slow
def test_equal_weights_and_client_level_privacy_give_the_same_as_in_clear() -> None:
    equal = toy_run(build("fedavg"), count=2, sampling=Uniform(equal_weights=True))
    private = toy_run(protect_clients(build("fedavg"), clip=0.05, noise=0.5, cohort=5), count=2, drift=False)
    for run in (equal, private):
        trace = Availability(trace={(1, "c2"): 0.0})
        clear, masked = play_clear(run, trace), play_secure(secured(run), availability=trace)
        assert distance(clear[-1].server.params, masked[-1].server.params) < 1e-6
        assert masked[-1].secure is not None
        assert masked[-1].secure["resolution"] < 1e-12  # all weights are 1, so there is much room
    assert masked[-1].loss is None


@pytest.mark.slow
def test_state_of_the_server_rule_takes_the_secure_mean() -> None:
    run = toy_run(Method("momentum", server_rule=ServerMomentum()), count=3)
    clear, masked = play_clear(run), play_secure(secured(run))
    assert distance(clear[-1].server.state["velocity"], masked[-1].server.state["velocity"]) < 1e-6


def test_resumed_run_is_bit_exact_whatever_the_secrets() -> None:
    run, model = secured(toy_run(build("fedavg"), count=4)), toy_model()

    def engine() -> Engine:
        return SecureEngine(SimulationEngine(run, model, CLIENTS, availability=Availability(0.1)), run, model)

    whole = list(rounds(run, model, engine()))
    half = list(islice(rounds(run, model, engine()), 2))
    rest = list(rounds(run, model, engine(), half[-1].server, 2))
    assert tensors.digest(whole[-1].server.params) == tensors.digest(rest[-1].server.params)
    assert whole[-1].loss == rest[-1].loss


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers share memory as on Linux")
def test_workers_give_the_same_bits() -> None:
    run, model = secured(toy_run(build("fedavg"), count=2)), toy_model()
    one = play_secure(run)
    workers = MultiprocessEngine(SimulationEngine(run, model, CLIENTS), 2)
    try:
        several = list(rounds(run, model, SecureEngine(workers, run, model)))
    finally:
        workers.close()
    assert tensors.digest(one[-1].server.params) == tensors.digest(several[-1].server.params)


def test_traffic_is_that_of_the_encoded_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    up, down = [], []
    for stage in ("add_advertisement", "add_shares", "add_checked", "add_masked", "add_confirmed", "add_unmasked"):
        original = getattr(SecureServer, stage)

        def received(self: SecureServer, client: str, data: bytes, original: object = original) -> None:
            up.append(len(data))
            original(self, client, data)  # type: ignore[operator]

        monkeypatch.setattr(SecureServer, stage, received)
    for stage in ("roster", "inbox", "present", "lists", "signatures"):
        original = getattr(SecureServer, stage)

        def sent(self: SecureServer, *client: str, original: object = original) -> bytes:
            down.append(len(original(self, *client)))  # type: ignore[operator]
            return original(self, *client)  # type: ignore[operator]

        monkeypatch.setattr(SecureServer, stage, sent)
    run = toy_run(build("fedavg"), count=1)
    trace = Availability(trace={(0, "c2"): 0.0})
    [clear], [masked] = play_clear(run, trace), play_secure(secured(run), availability=trace)
    assert sum(masked.traffic.up.values()) == sum(up)
    # Each message was made twice above, and so counted twice.
    assert sum(masked.traffic.down.values()) - sum(clear.traffic.down.values()) == 2 * sum(down)
    numbers = {name: value.numel() for name, value in toy_model().initial.items()}
    assert {name: count for name, count in masked.traffic.up.items() if name != serialization.HEADER} == {
        name: 4 * 8 * count for name, count in numbers.items()
    }


def test_server_sees_no_single_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the round loop gets from the engine: names, failures and one sum."""
    run, model = secured(toy_run(build("fedavg"), count=1)), toy_model()
    engine, replies = SecureEngine(SimulationEngine(run, model, CLIENTS), run, model), []
    original = SecureEngine.train

    def spied(self: SecureEngine, jobs: Iterable[Job]) -> Iterator[object]:
        for reply in original(self, jobs):
            replies.append(reply)
            yield reply

    monkeypatch.setattr(secure.SecureEngine, "train", spied)
    list(rounds(run, model, engine))
    assert [type(reply) for reply in replies] == [MaskedUpdate] * 5 + [SecureSum]


def test_engine_that_does_not_mask_is_refused() -> None:
    run = secured(toy_run(build("fedavg"), count=1))
    with pytest.raises(RunError, match="returns a Update in a run with secure aggregation"):
        play_clear(run)
    silent = ScriptedEngine(lambda job: MaskedUpdate(job.client), tuple(CLIENTS.clients))  # type: ignore[arg-type,return-value]
    with pytest.raises(RunError, match="returned no sum"):
        list(rounds(run, toy_model(), silent))
    with pytest.raises(RunError, match=r"no \[secure_aggregation\]"):
        list(rounds(replace(run, secure_aggregation=None), toy_model(), silent))


def test_plans_that_differ_in_a_round_are_refused_before_training() -> None:
    def plan(model: object, info: RoundInfo) -> Plan:
        names = toy_model().all_names()
        train = names - {min(names)} if info.client == "c3" and info.round == 1 else names
        return share(train, down=names)

    run = secured(toy_run(Method("odd", plan=plan, server_rule=ServerRule()), count=3))
    with pytest.raises(MethodError, match=r"odd cannot aggregate securely: in round 1 .* sends '.*' and c3 does not"):
        play_secure(run)
