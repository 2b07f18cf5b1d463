"""Privacy attacks: their statistics, that they find leaks, and that honest runs stay within their claim."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import Clients, toy_model, toy_run
from scipy.stats import binom, norm
from sklearn.metrics import roc_auc_score

from partita import report
from partita.core.dp_settings import PrivacyError, PrivacySettings
from partita.core.noise import block_noise
from partita.core.options import OptionError
from partita.core.rng import Key
from partita.core.rounds import rounds
from partita.engines.simulation import SimulationEngine
from partita.experiment.audit import audit
from partita.experiment.config import parse
from partita.experiment.runner import start
from partita.methods.fedavg import fedavg
from partita.privacy.canaries import (
    CanaryPopulation,
    Eavesdropper,
    canary_losses,
    choose_canaries,
    gradient_cosines,
    gradients_of,
)
from partita.privacy.guard import PrivacyGuard, make_private
from partita.privacy.membership import best_guesses, bound_epsilon, chance_of, confidence_of, likelihood_ratios, roc
from partita.testing.toy import ToyTransformer
from partita.training import private_gradients
from partita.training.batching import collate

DRAW = np.random.default_rng(0)


def test_roc_matches_scikit_learn() -> None:
    inside, outside = np.round(DRAW.normal(0.5, 1, 80), 1), np.round(DRAW.normal(0, 1, 60), 1)  # with ties
    found = roc(inside, outside)
    labels = np.concatenate([np.ones(80), np.zeros(60)])
    assert found.auc == pytest.approx(roc_auc_score(labels, np.concatenate([inside, outside])))
    assert (found.false[0], found.true[0], found.false[-1], found.true[-1]) == (0, 0, 1, 1)
    assert found.true_at(0.0) == float((inside > outside.max()).mean())
    about = json.loads(json.dumps(found.about()))
    assert about["members"] == 80
    assert roc(np.ones(5), np.ones(5)).auc == 0.5
    with pytest.raises(ValueError, match="there are 0 and 5"):
        roc([], np.ones(5))


def test_chance_of_right_guesses_is_binomial_at_delta_zero() -> None:
    for right, epsilon in product((5, 8, 10), (0.0, 1.0, 3.0)):
        wanted = binom.sf(right - 1, 10, 1 / (1 + math.exp(-epsilon)))
        assert chance_of(10, 10, right, epsilon, 0.0) == pytest.approx(float(wanted))
    assert chance_of(10, 10, 8, 1.0, 1e-3) > chance_of(10, 10, 8, 1.0, 0.0)
    assert chance_of(10, 10, 0, 1.0, 1e-3) == 1.0


def test_epsilon_bound_of_perfect_guesses_has_a_closed_form() -> None:
    """If all guesses are right, the accuracy to the power of the guesses equals the risk."""
    included = np.array([True, False] * 50)
    found = bound_epsilon(included.astype(float), included, delta=0.0)
    accuracy = (0.05 / 4) ** (1 / found.guesses)
    assert found.right == found.guesses == 100
    assert found.epsilon == pytest.approx(math.log(accuracy / (1 - accuracy)), rel=1e-4)
    assert bound_epsilon(included.astype(float), included, delta=1e-3).epsilon < found.epsilon
    assert bound_epsilon(-included.astype(float), included, delta=0.0).epsilon == 0


@pytest.mark.slow
def test_epsilon_bound_holds_for_randomized_response() -> None:
    """Randomized response with odds e^epsilon: the bound exceeds epsilon in at most 1 of 20 runs."""
    wrong, bounds = 0, []
    for _ in range(100):
        included = DRAW.random(200) < 0.5
        told = np.where(DRAW.random(200) < 1 / (1 + math.exp(-1.0)), included, ~included)
        bounds.append(bound_epsilon(told + 1e-3 * DRAW.random(200), included, 0.0).epsilon)
        wrong += bounds[-1] > 1.0
    assert wrong <= 5
    assert np.mean(bounds) > 0.4  # and the bound is not vacuous


def test_likelihood_ratios_find_membership_that_a_threshold_misses() -> None:
    """Each example has its own score level, which hides membership from a threshold but not from a ratio."""
    levels, gap = DRAW.normal(0, 5, 300), 1.0
    included = DRAW.random((24, 300)) < 0.5
    shadows = levels + gap * included + DRAW.normal(0, 0.5, included.shape)
    coins = DRAW.random(300) < 0.5
    target = levels + gap * coins + DRAW.normal(0, 0.5, 300)
    ratios = likelihood_ratios(target, shadows, included)
    assert roc(target[coins], target[~coins]).auc < 0.65
    best = float(norm.cdf(gap / 0.5 / math.sqrt(2)))  # if the levels were known
    assert roc(ratios[coins], ratios[~coins]).auc == pytest.approx(best, abs=0.05)
    included[:, 0] = True
    assert np.isnan(likelihood_ratios(target, shadows, included)[0])


def test_confidence_is_the_logit_of_the_correct_class() -> None:
    chance = np.array([0.01, 0.5, 0.99])
    assert confidence_of(-np.log(chance)) == pytest.approx(np.log(chance / (1 - chance)))
    assert np.isfinite(confidence_of(np.array([0.0, 1e3]))).all()


SIZES = {"a": 60, "b": 60}
MODEL = ToyTransformer(width=24, layers=1)


def test_excluded_canaries_are_masked_out() -> None:
    clients = Clients(a=8)
    canaries = choose_canaries(clients, 4, Key(1), classes=3)
    places = canaries.places["a"]
    coins = torch.tensor([True, False, False, True])
    canary_population = CanaryPopulation(clients, replace(canaries, coins={"a": coins}))
    batch = canary_population["a"].train.take(torch.arange(8))
    before = clients["a"].train.take(torch.arange(8))
    assert batch.mask is not None
    assert (batch.mask == 0).nonzero().flatten().tolist() == places[~coins].tolist()
    assert (batch.targets != before.targets).nonzero().flatten().tolist() == places.tolist()
    alone = canary_population.table("a").canaries_alone()
    assert torch.equal(alone.targets, batch.targets[places])
    assert torch.equal(alone.inputs["x"], before.inputs["x"][places])
    joined = collate([batch, canary_population["a"].train.take(torch.tensor([int(places[0])]))])
    assert joined.mask is not None
    assert torch.equal(joined.mask[0], batch.mask)
    assert joined.mask[1].tolist() == [1.0] + [0.0] * 7
    with pytest.raises(PrivacyError, match="9 canaries are asked for"):
        choose_canaries(clients, 9, Key(1))


def test_example_gradients_sum_to_the_batch_gradient() -> None:
    model, batch = toy_model(), Clients(a=6)["a"].train.take(torch.arange(6))
    names = sorted(model.initial)
    leaves = {name: value.clone().requires_grad_() for name, value in model.initial.items()}
    model.losses(model(leaves, batch.inputs), batch.targets).sum().backward()
    whole = torch.cat([leaves[name].grad.flatten() for name in names])  # type: ignore[union-attr]
    found = torch.cat(list(gradients_of(model, model.initial, names, batch)))
    assert torch.allclose(found.sum(0), whole, atol=1e-5)
    step = {name: -leaves[name].grad for name in names}  # type: ignore[operator]
    wanted = found @ whole / (found.norm(dim=1) * whole.norm())
    assert torch.allclose(gradient_cosines(model, model.initial, step, batch), wanted, atol=1e-5)


def eavesdrop(privacy: PrivacySettings | None, seed: int = 0) -> tuple[float, float, PrivacyGuard | None]:
    """(AUC, lower bound, guard) of an eavesdropper on two full-batch rounds, the easiest case for the attack."""
    clients = Clients(**SIZES)
    run = toy_run(fedavg(), count=2, lr=0.3, batch_size=60, seed=seed, drift=False)
    guard = make_private(run, MODEL, SIZES, privacy) if privacy else None
    run = guard.run if guard else run
    canaries = choose_canaries(clients, 100, Key(seed) / "audit", classes=3)
    canary_population = CanaryPopulation(clients, canaries)
    eavesdropper = Eavesdropper(run, MODEL, canary_population)
    *_, end = rounds(run, MODEL, SimulationEngine(run, MODEL, canary_population, block=2), listeners=[eavesdropper])
    assert len(canary_losses(MODEL, end.server.params, canary_population)) == 100
    included = canaries.included
    scores, bound = best_guesses(eavesdropper.scores(), included, 1e-5)
    return roc(scores[included], scores[~included]).auc, bound.epsilon, guard


@pytest.mark.parametrize("privacy", [None, PrivacySettings(noise=0.0)], ids=["plain", "clipped"])
def test_audit_identifies_members_when_there_is_no_noise(privacy: PrivacySettings | None) -> None:
    auc, bound, _ = eavesdrop(privacy)
    assert auc > 0.95
    assert bound > 1.5


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_audited_epsilon_does_not_exceed_the_claim(epsilon: float) -> None:
    _, bound, guard = eavesdrop(PrivacySettings(epsilon=epsilon, accountant="rdp"))
    assert guard is not None
    assert guard.planned is not None
    assert bound <= guard.planned <= epsilon


def test_audit_detects_a_false_privacy_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run claims epsilon 0.5 but draws a thousandth of the noise; the attacker knows only the claim."""
    monkeypatch.setattr(private_gradients, "block_noise", lambda like, keys, std: block_noise(like, keys, std / 1000))
    _, bound, guard = eavesdrop(PrivacySettings(epsilon=0.5, accountant="rdp"))
    assert guard is not None
    assert guard.planned is not None
    assert bound > 0.5 >= guard.planned


def test_best_of_several_attacks_corrects_the_confidence() -> None:
    included = DRAW.random(200) < 0.5
    known = included + 0.1 * DRAW.random(200)
    alone = bound_epsilon(known, included, 0.0)
    scores, best = best_guesses(np.stack([DRAW.random(200), known]), included, 0.0)
    assert scores is not known
    assert np.array_equal(scores, known)
    assert best == replace(bound_epsilon(known, included, 0.0, 0.975), confidence=0.95)
    assert 0 < best.epsilon < alone.epsilon


CONFIG = {
    "method": {"name": "fedavg"},
    "split": {"name": "iid", "clients": 3},
    "model": {"name": "vit", "layers": 1, "width": 8, "heads": 2, "patch": 4},
    "training": {"lr": 0.1, "optimizer": "sgd", "batch_size": 64, "steps": 1},
    "evaluate": {"every": 9, "personal_every": 9, "drift": False},
    "rounds": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["example", "client", None])
def test_finished_run_is_audited_and_recorded(tmp_path: Path, unit: str | None) -> None:
    privacy = {"privacy": {"noise": 4.0, "accountant": "rdp", "unit": unit}} if unit else {}
    unfinished = start(parse({**CONFIG, "rounds": 2, **privacy}), tmp_path / "part")
    next(unfinished)
    unfinished.close()
    with pytest.raises(PrivacyError, match="no finished run"):
        audit(tmp_path / "part")
    list(start(parse({**CONFIG, **privacy}), tmp_path / "run"))
    with pytest.raises(PrivacyError, match="set their number with --canaries"):
        audit(tmp_path / "run", shadows=2)
    found = audit(tmp_path / "run", canaries=30, shadows=2)
    assert json.loads((tmp_path / "run" / "audit.json").read_text()) == found
    seen = {"loss of the final model", "canaries", "shadow runs (LiRA)"}
    assert found["attacks"].keys() == (seen if unit == "client" else seen | {"one more update"})
    assert found["bound"]["canaries"] == 30
    assert (found["claim"] or {}).get("unit") == unit


def test_report_shows_claim_spending_and_attacks(tmp_path: Path) -> None:
    curve = {
        "auc": 0.9,
        "true_at_1%": 0.5,
        "members": 5,
        "outsiders": 4,
        "false": [0.0, 0.0, 1.0],
        "true": [0.0, 0.5, 1.0],
    }
    claim = {"unit": "example", "budget": 1.0, "delta": 1e-5, "noise": 2.5, "clip": 1.0, "planned": 0.98}
    bound = {"epsilon": 1.4, "guesses": 20, "right": 19, "canaries": 40, "delta": 1e-5, "confidence": 0.95}
    rows = [
        {"round": number, "test": {"accuracy": 0.5}, "seconds": 1.0, "privacy": {"epsilon": 0.49 * (number + 1)}}
        for number in range(2)
    ]
    (tmp_path / "config.toml").write_text('label = "ours"\nseed = 0\nrounds = 2\n')
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "privacy.json").write_text(json.dumps(claim))
    (tmp_path / "audit.json").write_text(json.dumps({"claim": claim, "attacks": {"canaries": curve}, "bound": bound}))
    record = report.load_run(tmp_path)
    text = report.page([record], tmp_path / "page.html").read_text()
    shown = ('id="privacy"', "2.5 × 1", "0.98", "50.0%", "at least 1.4", "The claim is false", 'id="chart-attacks"')
    for words in shown:
        assert words in text
    assert report.compare([record]).lines[0].epsilon == 0.98
    honest = {"claim": {**claim, "planned": 2.0}, "attacks": {}, "bound": bound}
    (tmp_path / "audit.json").write_text(json.dumps(honest))
    assert "The claim is false" not in report.page([report.load_run(tmp_path)], tmp_path / "page.html").read_text()
    for file in ("privacy.json", "audit.json"):
        (tmp_path / file).unlink()
    assert 'id="privacy"' not in report.page([report.load_run(tmp_path)], tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_budget_and_audit_commands_print_results_and_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from partita.cli.main import app

    run = str(tmp_path)
    (tmp_path / "config.toml").touch()

    app(
        ["budget", "--noise", "20", "--examples", "100", "--batch", "10", "--rounds", "2", "--json"],
        standalone_mode=False,
    )
    told = json.loads(capsys.readouterr().out)
    assert told["noise"] == 20
    assert told["after"]["2"] == told["epsilon"]
    with pytest.raises(OptionError, match="--config, or --examples"):
        app(["budget", "--epsilon", "1"], standalone_mode=False)
    curve = {"auc": 0.9, "true_at_1%": 0.5}
    found = {
        "attacks": {"canaries": curve},
        "claim": {"planned": 2.0},
        "bound": {"epsilon": 1.4, "right": 9, "guesses": 10},
    }
    monkeypatch.setattr("partita.experiment.audit.audit", lambda folder, canaries, shadows, trust_code, group: found)
    assert app(["audit", run, "--canaries", "20"], standalone_mode=False) == 0
    out = capsys.readouterr().out
    assert "canaries: AUC 0.900, 50.0% true positives" in out
    assert "at least 1.4: 9 of 10 guesses were right" in out
    assert "claimed to be at most 2" in out
    found["claim"] = {"planned": 1.0}
    assert app(["audit", run, "--json"], standalone_mode=False) == 1
    assert json.loads(capsys.readouterr().out) == found
    assert app(["audit", run], standalone_mode=False) == 1
    assert "does not hold: epsilon is at least 1.4, and 1 was claimed" in capsys.readouterr().out
