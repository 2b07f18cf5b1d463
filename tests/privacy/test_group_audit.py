"""Audits with canary patients: honest runs stay below their claim, and privacy by example does not protect patients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mechanism
import pytest
import torch
from evidence import judge
from group_fixtures import Hospitals, Patients, scans_config, write_scans
from helpers import toy_model, toy_run
from mechanism import check_examples
from torch import Tensor
from torch.nn import functional

from partita.core.client_rule import PrivacyRelease
from partita.core.data import ClientData
from partita.core.dp_settings import PrivacyError, PrivacySettings
from partita.core.model import Model, Output
from partita.core.rng import Key
from partita.core.rounds import initial_server, rounds
from partita.core.settings import Run
from partita.core.tensors import Tensors
from partita.data import DataError
from partita.engines.simulation import SimulationEngine
from partita.experiment.audit import audit, failures
from partita.experiment.runner import start
from partita.methods.fedavg import fedavg
from partita.privacy.canaries import CanaryPopulation, Eavesdropper, canary_losses, choose_canaries
from partita.privacy.membership import Bound, best_guesses
from partita.privacy.spending import TRAINING, PrivacySpending, find_noise
from partita.training import private_gradients
from partita.training.dp_sgd import clipped_sum

PATIENTS, RECORDS = 60, 20
DELTA = 1e-5


@pytest.fixture
def small_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanism, "STEPS", 3)
    monkeypatch.setattr(mechanism, "INSPECTED_ROUNDS", 24)


class Weights(Model):
    """A linear classifier, with a row of weights for each patient of `Wards`: nobody hides the gradient of another."""

    name = "weights"
    tags = {"w": frozenset({"head"})}  # noqa: RUF012

    def __init__(self) -> None:
        self.initial = {"w": torch.zeros(PATIENTS, 3)}

    def to(self, device: torch.device) -> None:
        pass

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        return Output(inputs["x"] @ params["w"])

    def losses(self, out: Output, targets: Tensor) -> Tensor:
        return functional.cross_entropy(out.logits, targets, reduction="none")


class Wards:
    """Two clients whose patients have many records each, all alike."""

    clients = ("a", "b")

    def __init__(self) -> None:
        groups = torch.arange(PATIENTS).repeat_interleave(RECORDS)
        self.part = Patients(torch.eye(PATIENTS)[groups], groups % 3, groups)

    def __getitem__(self, client: str) -> ClientData:
        return ClientData(self.part, self.part, self.part)


def bound_of(run: Run, population: Any, seed: int, count: int = 100) -> Bound:
    """The lower bound on epsilon that an eavesdropper on the updates proves with canary patients."""
    canaries = choose_canaries(population, count, Key(seed) / "audit", classes=3, by_group=True)
    watched, model = CanaryPopulation(population, canaries), Weights()
    eavesdropper = Eavesdropper(run, model, watched)
    for _ in rounds(run, model, SimulationEngine(run, model, watched), listeners=[eavesdropper]):
        pass
    return best_guesses(eavesdropper.scores(), canaries.included, DELTA)[1]


def audited_run(unit: str, claim: float, seed: int) -> Run:
    """Two rounds of four steps in which everyone takes part, with the noise for this claim: the easiest to attack."""
    account = PrivacySpending(DELTA)
    account.charge("a", [PrivacyRelease(TRAINING, 1.0, 1.0, 8)])
    settings = PrivacySettings(
        clip=0.5, noise=find_noise(account, claim), unit=unit, group="patient" if unit == "group" else None
    )
    return toy_run(replace(fedavg(), privacy=settings), 2, seed=seed, batch_size=PATIENTS * RECORDS, steps=4, lr=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("claim", [2.0, 8.0])
def test_bound_of_canary_patients_stays_below_the_claim(claim: float) -> None:
    assert bound_of(audited_run("group", claim, 0), Wards(), 0).epsilon <= claim


@pytest.mark.slow
def test_privacy_by_example_does_not_protect_patients_with_many_records() -> None:
    """Twenty records of a patient are twenty times as visible as one, and the claim is about one."""
    bound = bound_of(audited_run("example", 2.0, 0), Wards(), 0)
    assert bound.epsilon > 2.0
    assert bound.right >= 0.97 * bound.guesses


def sum_by_record(loss: Any, trainable: Any, inputs: Any, targets: Any, mask: Any, settings: Any, one: bool) -> Any:
    """A wrong program: each record is clipped by itself, so a patient contributes as many clips as it has records."""
    flat = {name: value.flatten(0, 1) for name, value in inputs.items()}

    def single(params: Tensors, inputs: Tensors, targets: Tensor) -> tuple[Tensor, Tensor]:
        return loss(params, inputs, targets, torch.ones(1))  # type: ignore[no-any-return]

    plain = replace(settings, unit="example", group=None)
    total, losses = clipped_sum(single, trainable, flat, targets.flatten(0, 1), mask.flatten(), plain, one)
    return total, losses.unflatten(0, targets.shape[:2]).mean(1)


@pytest.mark.slow
def test_clipping_examples_in_place_of_groups_is_found_by_the_checks(
    small_checks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_gradients, "clipped_sum", sum_by_record)
    assert "largest contribution of one group / clip" in failed_checks()


@pytest.mark.slow
def test_clipping_examples_in_place_of_groups_is_found_by_canaries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_gradients, "clipped_sum", sum_by_record)
    assert bound_of(audited_run("group", 2.0, 0), Wards(), 0).epsilon > 2.0


def failed_checks(side_by_side: int = 1, **privacy: Any) -> set[str]:
    settings = PrivacySettings(**{"clip": 0.5, "noise": 0.8, "unit": "group", "group": "patient", **privacy})
    run, model = toy_run(replace(fedavg(), privacy=settings), batch_size=8), toy_model()
    hospitals = Hospitals(a=[3, 1, 2, 5] * 10, b=[2] * 24, c=[4, 1, 1, 2, 6, 1])
    checks = judge(check_examples(run, model, hospitals, initial_server(run, model), side_by_side))
    assert "sampling rate" in {check["what"] for check in checks}
    assert "groups in common between batches of two steps" in {check["what"] for check in checks}
    return {check["what"] for check in checks if not check["passed"]}


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 3])
def test_checks_of_the_mechanism_pass_an_honest_run_by_group(small_checks: None, block: int) -> None:
    assert not failed_checks(block)
    assert not failed_checks(block, max_per_group=2)


@pytest.mark.slow
def test_checks_find_shuffled_groups(small_checks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from partita.core import client

    monkeypatch.setattr(client, "poisson_batches", client.shuffled_batches)
    assert failed_checks()


# ---- the parts of the attack


def test_a_canary_patient_is_included_or_left_out_whole() -> None:
    hospitals = Hospitals(a=[3, 1, 4], b=[2, 2])
    canaries = choose_canaries(hospitals, 4, Key(2), classes=3, by_group=True)
    assert sum(canaries.count(client) for client in canaries.places) == len(canaries.included) == 4
    assert not all(canaries.included)
    for client in canaries.places:
        part = hospitals.parts[client]
        batch = CanaryPopulation(hospitals, canaries)[client].train.take(torch.arange(len(part)))
        assert batch.mask is not None
        owners = canaries.owners_of(client)
        for number, coin in enumerate(canaries.coins[client].tolist()):
            rows = canaries.places[client][owners == number]
            group = part.groups[rows].unique()
            assert len(group) == 1
            assert torch.equal(rows, (part.groups == group).nonzero().flatten())
            assert batch.mask[rows].tolist() == [float(coin)] * len(rows)
            assert ((batch.targets[rows] - part.y[rows]) % 3 == 1).all()


def test_losses_of_canary_patients_are_means_over_their_records() -> None:
    hospitals, model = Hospitals(a=[3, 1, 4], b=[2]), toy_model()
    population = CanaryPopulation(hospitals, choose_canaries(hospitals, 4, Key(2), by_group=True))
    found = iter(canary_losses(model, model.initial, population))
    for client in ("a", "b"):
        part, canaries = hospitals.parts[client], population.canaries
        losses = model.losses(model(model.initial, {"x": part.x}), part.y)
        for number in range(canaries.count(client)):
            rows = canaries.places[client][canaries.owners_of(client) == number]
            assert next(found) == pytest.approx(float(losses[rows].mean()), rel=1e-5)


def test_more_canary_patients_than_patients_are_refused() -> None:
    with pytest.raises(PrivacyError, match="there are 5 groups with training examples; ask for fewer"):
        choose_canaries(Hospitals(a=[3, 1, 4], b=[2, 2]), 6, Key(0), by_group=True)


# ---- the command


@pytest.mark.slow
def test_audit_by_group_of_a_run_by_example(tmp_path: Path) -> None:
    """What the canaries prove is about patients, and the run claims nothing about them."""
    path = write_scans(tmp_path / "scans", [4] * 16)
    list(start(scans_config(path, privacy__unit="example", privacy__group=None), tmp_path / "run"))
    findings = audit(tmp_path / "run", canaries=8, group="patient_id")
    assert findings["group"] == "patient_id"
    assert findings["bound"]["canaries"] == 8
    assert not failures({**findings, "bound": {**findings["bound"], "epsilon": 1e9}})
    without = {key: value for key, value in findings.items() if key != "group"}
    assert failures({**without, "bound": {**findings["bound"], "epsilon": 1e9}}), "of single examples it would be false"
    with pytest.raises(PrivacyError, match="--group needs canaries"):
        audit(tmp_path / "run", group="patient_id")
    with pytest.raises(DataError, match="have no such column"):
        audit(tmp_path / "run", canaries=8, group="visit")


@pytest.mark.slow
def test_audit_of_a_run_by_group_has_canary_groups_and_keeps_its_claim(tmp_path: Path) -> None:
    list(start(scans_config(write_scans(tmp_path / "scans", [4] * 16)), tmp_path / "run"))
    findings = audit(tmp_path / "run", canaries=8)
    assert not failures(findings)
    assert failures({**findings, "bound": {**findings["bound"], "epsilon": 1e9}})
    with pytest.raises(PrivacyError, match="the run has the groups of another column"):
        audit(tmp_path / "run", canaries=8, group="visit")
