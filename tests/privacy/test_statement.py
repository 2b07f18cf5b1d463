"""The statement in words: its numbers are computed, and it claims no more than the guarantee."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from group_fixtures import scans_config, write_scans
from typer.testing import CliRunner

from partita.cli.main import app
from partita.core.client_rule import PrivacyRelease
from partita.core.dp_settings import PrivacyError
from partita.experiment.builder import build
from partita.experiment.privacy_statement import statement_of_config, statement_of_run
from partita.experiment.runner import start
from partita.privacy.disclosure import disclosed
from partita.privacy.ledger import Charge, Ledger, Limit
from partita.privacy.statement import Subject, posterior, statement
from partita.storage.atomic_files import read_json


def about(**changes: Any) -> dict[str, Any]:
    unit = changes.get("unit", "group")
    return {
        "unit": unit,
        **({"group": "patient_id"} if unit == "group" else {}),
        "delta": 1e-6,
        "noise": 1.25,
        "clip": 0.5,
        "sampling": "poisson",
        "accountant": "pld",
        "repeatable": False,
        **disclosed(unit),
        **changes,
    }


def table(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\| (\d+%) \| (\S+) \|$", text, re.M))


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 2.0, 8.0])
def test_odds_are_those_of_the_likelihood_ratio(epsilon: float) -> None:
    """Bayes: the odds grow by at most exp(epsilon)."""
    for prior in (0.01, 0.1, 0.5):
        after = posterior(prior, epsilon)
        assert after / (1 - after) == pytest.approx(math.exp(epsilon) * prior / (1 - prior))
    assert posterior(0.5, 0.0) == 0.5
    found = table(statement(Subject("study", about(), epsilon, 5)))
    assert set(found) == {"1%", "10%", "50%"}
    for prior, text in found.items():
        exact = posterior(float(prior[:-1]) / 100, epsilon)
        assert float(text[:-1]) / 100 == pytest.approx(exact, abs=6e-4)
        assert text != "100%"


def test_randomized_response_reaches_the_stated_odds() -> None:
    """The bound is tight: this mechanism tells the truth with probability e / (1 + e)."""
    truth = math.exp(1.0) / (1 + math.exp(1.0))
    prior = 0.1
    after = prior * truth / (prior * truth + (1 - prior) * (1 - truth))
    assert posterior(prior, 1.0) == pytest.approx(after)


def test_statement_names_the_unit_the_numbers_and_what_is_not_covered() -> None:
    text = statement(Subject("study", about(), 2.0, 5))
    assert "epsilon = 2 and delta = 1e-06, for each group" in text
    assert "`patient_id`" in text
    assert "1.25 times that limit" in text
    assert "the cost adds up over these clients" in text
    for what in disclosed("group")["not_covered"]:
        assert f"- {what}" in text
    assert "is a plan for 5 rounds" in text
    assert "covers the 5 rounds" in statement(Subject("study", about(), 2.0, 5, finished=True))
    assert "'partita audit' makes some" in text
    by_client = statement(Subject("study", about(unit="client", sampling="cohort"), 2.0, 5))
    assert "without noise and is trusted" in by_client
    by_example = statement(Subject("study", about(unit="example"), 2.0, 5))
    assert "with k records, epsilon is up to k times as large" in by_example


def test_a_weak_bound_is_called_weak() -> None:
    assert "This bound is weak" in statement(Subject("study", about(), 8.0, 5))
    assert "weak" not in statement(Subject("study", about(), 1.0, 5))


def test_evidence_is_compared_with_the_claim() -> None:
    bound = {"epsilon": 1.3, "canaries": 100, "guesses": 40, "right": 38, "confidence": 0.95}
    text = statement(Subject("study", about(), 2.0, 5, bound=bound))
    assert "38 of 40 guesses were right. So epsilon is at least 1.3, with a confidence of 95%" in text
    assert "which does not contradict" in text
    assert "which contradicts the guarantee" in statement(Subject("study", about(), 1.0, 5, bound=bound))


def test_ledger_total_is_computed(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger.jsonl", Limit(8.0, 1e-6, "group", "patient_id"))
    ledger.charge(Charge("run", 0, "a", (PrivacyRelease("training", 1.0, 0.1, 50),)))
    text = statement(Subject("study", about(), 2.0, 5, ledger=ledger))
    assert f"epsilon {ledger.spent():.3g} of 8 is spent" in text


@pytest.mark.parametrize(
    ("changes", "epsilon", "reason"),
    [
        ({"repeatable": True}, 1.0, "noise that anyone can recompute"),
        ({}, None, "no finite epsilon"),
        ({}, math.inf, "no finite epsilon"),
    ],
)
def test_no_statement_without_a_guarantee(changes: dict[str, Any], epsilon: float | None, reason: str) -> None:
    with pytest.raises(PrivacyError, match=reason):
        statement(Subject("study", about(**changes), epsilon, 5))


def test_names_cannot_move_the_cursor() -> None:
    text = statement(Subject("study\x1b[2J", about(group="a\x1b[2J"), 1.0, 5))
    assert "\x1b" not in text


def test_statements_of_a_config_and_of_its_run(tmp_path: Path) -> None:
    config = scans_config(write_scans(tmp_path / "scans", [2, 3, 1] * 8), privacy__noise=3.0)
    guard = build(config).guard
    assert guard is not None
    assert f"epsilon = {guard.planned:.3g}" in statement_of_config(config)
    rows = list(start(config, tmp_path / "run"))
    text = statement_of_run(tmp_path / "run")
    assert f"epsilon = {rows[-1]['privacy']['epsilon']:.3g}" in text
    assert "covers the 2 rounds" in text
    assert read_json(tmp_path / "run" / "privacy.json")["group"] in text
    out = tmp_path / "statement.md"
    done = CliRunner().invoke(
        app, ["budget", "--run", str(tmp_path / "run"), "--statement", "--out", str(out)], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert out.read_text() == text


def test_no_statement_of_a_run_that_is_not_private(tmp_path: Path) -> None:
    config = scans_config(write_scans(tmp_path / "scans", [2, 3, 1] * 8), privacy__noise=3.0)
    from dataclasses import replace

    with pytest.raises(PrivacyError, match=r"no \[privacy\] table"):
        statement_of_config(replace(config, privacy=None))
