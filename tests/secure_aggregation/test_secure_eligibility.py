"""Which methods aggregate securely, and what they cost before they run."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from helpers import Clients, small_config, toy_model, toy_run
from method_options import BRIEF
from secure_fixtures import confirm_stage, mask_stage, names, random_vector, setup_for, unmask_stage

from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.optim import SGD, AdamW
from partita.core.rng import Key
from partita.core.rounds import rounds
from partita.core.secure_settings import SecureAggregation
from partita.engines.availability import Availability
from partita.engines.secure import SecureEngine
from partita.engines.simulation import SimulationEngine
from partita.experiment.builder import build as build_experiment
from partita.experiment.config import parse
from partita.experiment.preview import preview_of
from partita.methods import INDEX, NEEDS_DUAL_ENCODER, NEEDS_FACTORS, build
from partita.secure_aggregation.costs import client_costs
from partita.secure_aggregation.eligibility import check_eligible, why_not
from partita.secure_aggregation.encoding import ProtocolError, TooFewClients

GUIDE = Path(__file__).resolve().parent.parent.parent / "docs" / "guide" / "secure-aggregation.md"
REFUSED = {
    "scaffold": "ScaffoldServer",
    "fednova": "FedNovaServer",
    "feddyn": "FedDynServer",
    "fedadamw": "FedAdamWServer",
    "median": "RobustServer",
    "trimmed-mean": "RobustServer",
    "krum": "RobustServer",
    "geometric-median": "RobustServer",
    "safl": "TopLayers",
    "prune": "TopKMagnitude",
    "quantize": "Int8Quantizer",
    "flora": "FloraServer",
    "fedtp": "HypernetworkServer",
    "pfedme": "PFedMeServer",
    "centralized": "pooled",
    "zero-shot": "sends nothing",
    "local-only": "sends nothing",
}


@pytest.mark.parametrize("name", INDEX)
def test_every_method_is_eligible_or_refused_by_name_with_the_reason(name: str) -> None:
    method = build(name, BRIEF.get(name, {}))
    reason = why_not(method)
    if reason is None and name not in (*NEEDS_DUAL_ENCODER, *NEEDS_FACTORS, "lora"):
        optimizer = SGD() if method.supports_optimizer("sgd") else AdamW()
        run = toy_run(method, optimizer=optimizer, drift=False, secure_aggregation=SecureAggregation())
        model = method.extend(toy_model(), Key(0)) if method.extend else toy_model()
        try:
            check_eligible(run, model, ["a", "b", "c"])
        except MethodError as error:
            reason = str(error)
    assert (reason is None) == (name not in REFUSED), reason
    assert REFUSED.get(name, "") in (reason or "")
    row = next(line for line in GUIDE.read_text(encoding="utf-8").splitlines() if f"`{name}`" in line)
    assert ("refused" in row) == (name in REFUSED), row


def test_safl_is_eligible_if_its_clients_agree_on_layers() -> None:
    assert why_not(build("safl", {"agree": True})) is None
    assert "method.agree = true" in (why_not(build("safl")) or "")
    run = toy_run(build("safl", {"agree": True}), drift=False, secure_aggregation=SecureAggregation())
    check_eligible(run, toy_model(), ["a", "b", "c"])


def test_cohorts_that_are_too_small_or_do_not_fit_are_refused_before_the_first_round() -> None:
    run = toy_run(build("fedavg"), secure_aggregation=SecureAggregation(bits=32))
    with pytest.raises(TooFewClients, match="a round has 2 clients"):
        check_eligible(run, toy_model(), ["a", "b"])
    with pytest.raises(ProtocolError, match=r"federation\.max_examples"):
        check_eligible(run, toy_model(), ["a", "b", "c"])
    check_eligible(toy_run(Method("mean"), drift=False), toy_model(), ["a"])  # in clear


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": {"name": "median"}}, "median cannot aggregate securely: RobustServer"),
        ({"method": {"name": "fedavg+quantize"}}, "Int8Quantizer"),
    ],
)
def test_config_is_refused_when_it_is_built(changes: dict[str, object], message: str) -> None:
    raw = tomllib.loads(small_config("fedavg", 1).to_toml())
    for key in ("label", "code", "method"):
        raw.pop(key, None)
    with pytest.raises(ValueError, match=message):
        build_experiment(parse({"method": {"name": "fedavg"}, **raw, **changes, "secure_aggregation": {}}))


def test_costs_are_those_of_the_messages() -> None:
    for count in (3, 6):
        setup = setup_for(count)
        vectors = {name: random_vector(setup, place) for place, name in enumerate(names(count))}
        server, clients, _ = mask_stage(setup, vectors)
        confirm_stage(server, clients)
        unmask_stage(server, clients)
        costs = client_costs(setup, names(count), "c001")
        assert count * (costs.vector + costs.up) == sum(server.up.values())
        assert count * costs.down == sum(server.down.values())


def test_preview_counts_the_bytes_of_a_round_and_says_that_it_is_secure() -> None:
    clients = Clients(c0=3, c1=9, c2=12)
    run = toy_run(build("fedavg"), count=2, drift=False, secure_aggregation=SecureAggregation())
    shown = preview_of(run, toy_model(), clients.clients, round=1, availability=Availability())
    engine = SecureEngine(SimulationEngine(run, toy_model(), clients), run, toy_model())
    last = list(rounds(run, toy_model(), engine))[-1]
    assert 3 * shown.bytes_up == sum(last.traffic.up.values())
    assert 3 * shown.bytes_down == sum(last.traffic.down.values())
    assert "Secure aggregation: the update is one vector of 64-bit numbers" in shown.to_text()
    assert "sums of at least 3 updates, with up to 2 of 3 clients on its side if it follows" in shown.to_text()
