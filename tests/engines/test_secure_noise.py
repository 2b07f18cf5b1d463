"""Noise at the clients in whole rounds: what the server's model gets, dropouts, resumed runs, records and audits."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mechanism_client_noise
import pytest
import torch
from helpers import Clients, toy_run

from partita import report
from partita.core import tensors
from partita.core.dp_settings import PrivacySettings
from partita.core.model import layer_tag
from partita.core.rng import Key
from partita.core.rounds import RoundResult, rounds
from partita.core.secure_settings import SecureAggregation
from partita.core.settings import Run, RunError
from partita.engines.availability import Availability
from partita.engines.secure import SecureEngine
from partita.engines.simulation import SimulationEngine
from partita.experiment.audit import audit
from partita.experiment.builder import build
from partita.experiment.config import parse
from partita.experiment.runner import resume, start
from partita.methods.fedavg import fedavg
from partita.methods.safl import safl
from partita.privacy.client_level import protect_clients
from partita.privacy.guard import make_private
from partita.secure_aggregation.eligibility import check_eligible
from partita.testing.toy import ToyTransformer

MODEL = ToyTransformer(width=24, layers=3)
CLIENTS = Clients(c0=3, c1=9, c2=12, c3=6, c4=5, c5=4)
SIZES = {client: len(CLIENTS[client].train) for client in CLIENTS.clients}
SETTINGS = SecureAggregation(collusion=0.0)  # four of six clients must stay
CONFIG: dict[str, Any] = {
    "rounds": 2,
    "method": {"name": "fedavg"},
    "data": {"name": "synthetic", "size": 4, "examples": 60, "test_examples": 20},
    "split": {"name": "iid", "clients": 5},
    "model": {"name": "vit", "width": 8, "layers": 2, "heads": 1, "patch": 2},
    "training": {"optimizer": "sgd", "lr": 0.1, "batch_size": 4, "steps": 1},
    "privacy": {"unit": "client", "noise": 2.0},
    "secure_aggregation": {},
}


def play_secure(run: Run, availability: Availability | None = None) -> list[RoundResult]:
    inner = SimulationEngine(run, MODEL, CLIENTS, availability=availability)
    return list(rounds(run, MODEL, SecureEngine(inner, run, MODEL)))


def private_run(count: int = 1, noise: float = 2.0, clip: float = 0.5) -> Run:
    run = replace(toy_run(fedavg(), count), secure_aggregation=SETTINGS, secret=Key(5))
    return make_private(run, MODEL, SIZES, PrivacySettings("client", noise=noise, clip=clip)).run


def away(*clients: str) -> Availability:
    return Availability(trace={(0, client): 0.0 for client in clients})


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("gone", [(), ("c1", "c4")])
def test_server_gets_the_mean_with_the_noise_of_those_that_stayed(gone: tuple[str, ...]) -> None:
    run = private_run()
    [noisy] = play_secure(run, away(*gone))
    [clean] = play_secure(replace(run, client_noise=None), away(*gone))
    drawn = tensors.subtract(noisy.server.params, clean.server.params)
    values = torch.cat([value.flatten() for value in drawn.values()]).double() * 6  # the cohort, by which it is divided
    stayed, honest = 6 - len(gone), 4
    wanted = 2.0 * 0.5 * math.sqrt(stayed / honest)
    assert len(values) > 3000
    assert float(values.std()) == pytest.approx(wanted, rel=5 / math.sqrt(2 * len(values)))
    assert wanted >= 2.0 * 0.5, "at least what is charged"
    # Without noise it is client-level privacy in clear: clipped updates over a fixed cohort.
    in_clear = replace(toy_run(protect_clients(fedavg(), 0.5, 0.0, 6), 1), secret=Key(5))
    [clear] = rounds(in_clear, MODEL, SimulationEngine(in_clear, MODEL, CLIENTS, availability=away(*gone)))
    difference = tensors.subtract(clear.server.params, clean.server.params)
    assert max(float(value.abs().max()) for value in difference.values()) < 1e-6


def test_too_few_clients_release_nothing() -> None:
    with pytest.raises(RunError, match=r"cannot be unmasked: 3 of 6 clients sent their vector.*the threshold is 4"):
        play_secure(private_run(), away("c0", "c1", "c2"))


@pytest.mark.slow
def test_clients_of_safl_that_agree_can_aggregate_securely() -> None:
    """The same layers and the same model as in clear, within the resolution."""
    run = toy_run(safl(k=1, agree=True), 4)
    secure = replace(run, drift=False, secure_aggregation=SETTINGS)
    check_eligible(secure, MODEL, CLIENTS.clients)
    clear = list(rounds(run, MODEL, SimulationEngine(run, MODEL, CLIENTS)))
    for one, two in zip(clear, play_secure(secure), strict=True):
        assert one.sent == two.sent
        [names] = set(two.sent.values())
        assert len({layer for name in names if (layer := layer_tag(MODEL.tags[name]))}) == 1
        difference = tensors.subtract(one.server.params, two.server.params)
        assert max(float(value.abs().max()) for value in difference.values()) < 1e-5
        assert two.metrics == {}


@pytest.mark.slow
def test_config_turns_noise_at_the_clients_on() -> None:
    experiment = build(parse(CONFIG))
    run, guard = experiment.run, experiment.guard
    assert guard is not None
    assert run.client_noise is not None
    assert run.secure_aggregation is not None
    assert run.secure_aggregation.min_clients == 4, "two thirds of five"
    assert run.client_noise.honest == 3, "of which one may collude"
    in_clear = build(parse({key: value for key, value in CONFIG.items() if key != "secure_aggregation"})).run
    assert in_clear.client_noise is None
    assert in_clear.hidden_cohorts
    assert in_clear.method.transforms[0].noise == 2.0  # type: ignore[attr-defined]


@pytest.mark.slow
def test_run_is_recorded_resumed_and_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.experiment.builder.draw", lambda: Key(77))
    rows = list(start(parse(CONFIG), tmp_path / "whole"))
    assert [row["privacy"]["epsilon"] > 0 for row in rows] == [True, True]
    assert rows[0]["privacy"]["epsilon"] < rows[1]["privacy"]["epsilon"]
    assert rows[0]["train_loss"] is None
    cut = start(parse(CONFIG), tmp_path / "cut")
    next(cut)
    cut.close()
    monkeypatch.undo()
    list(resume(parse(CONFIG), tmp_path / "cut"))
    digests = [json.loads((tmp_path / name / "result.json").read_text())["digest"] for name in ("whole", "cut")]
    assert digests[0] == digests[1], "resumed bit for bit"
    about = json.loads((tmp_path / "whole" / "privacy.json").read_text())
    said = "at the clients, before secure aggregation; the server is not trusted"
    assert (about["noise_added"], about["unit"], about["accountant"]) == (said, "client", "rdp")
    assert said in report.page([report.load_run(tmp_path / "whole")], tmp_path / "report.html").read_text()
    assert "loss of the final model" in audit(tmp_path / "whole")["attacks"]


@pytest.mark.slow
def test_audit_finds_noise_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    run, model, engine = private_run(3), MODEL, SimulationEngine(private_run(3), MODEL, CLIENTS)
    server = next(rounds(run, model, SecureEngine(engine, run, model))).server
    assert all(check.p > 1e-4 for check in mechanism_client_noise.check_client_noise(run, model, engine, server))
    add_noise = mechanism_client_noise.client_vector.__globals__["add_noise"]

    def too_little(values: Any, client_noise: Any, *more: Any) -> Any:
        return add_noise(values, replace(client_noise, noise=0.9 * client_noise.noise), *more)

    monkeypatch.setitem(mechanism_client_noise.client_vector.__globals__, "add_noise", too_little)
    checks = {check.what: check for check in mechanism_client_noise.check_client_noise(run, model, engine, server)}
    assert checks["noise multiplier"].found == pytest.approx(1.8, rel=0.03)
    assert checks["noise multiplier"].p < 1e-6
