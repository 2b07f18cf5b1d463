"""A site charges a remembered layer choice once, also if the update of the round in which it was made did not leave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from helpers import Clients, toy_run

from partita.core.client_rule import PrivacyRelease
from partita.core.dp_settings import PrivacySettings
from partita.core.plan import RoundInfo, plan_for
from partita.methods.safl import safl
from partita.privacy.guard import make_private
from partita.privacy.spending import releases_of
from partita.site.consent import LEFT, History, JobConsent
from partita.testing.toy import ToyTransformer

MODEL = ToyTransformer(width=4, layers=4)
SIZES = {"a": len(Clients(a=8)["a"].train)}
CHOICE = PrivacyRelease("layer choice", 2.0, 0.5)
MINE, OTHER = "mine", "other"


def line(kind: str, number: int, experiment: str = MINE) -> dict[str, Any]:
    return {"kind": kind, "experiment": experiment, "tensors": f"{kind}{number}", "round": number}


def choices_charged(lines: list[dict[str, Any]], number: int, every: int = 3, agree: bool = False) -> int:
    guard = make_private(
        toy_run(safl(k=1, noise=2.0, probe=0.5, every=every, agree=agree), 9), MODEL, SIZES, PrivacySettings(noise=1.0)
    )
    plan = plan_for(guard.run.method.plan, MODEL, RoundInfo(number, 9, "a"))
    terms: Any = SimpleNamespace(
        unit="example",
        digest=MINE,
        experiment=SimpleNamespace(run=guard.run),
        releases=lambda plan, number: releases_of(guard.run, plan, SIZES["a"], number),
    )
    policy: Any = None
    return JobConsent(policy, terms, History(lines)).releases(plan, number).count(CHOICE)


@pytest.mark.slow
@pytest.mark.parametrize("agree", [False, True])
def test_choice_is_charged_with_the_update_of_its_round(agree: bool) -> None:
    left = [line(LEFT, number) for number in range(3)]
    assert [choices_charged(left[:number], number, agree=agree) for number in range(4)] == [1, 0, 0, 1]
    assert [choices_charged(left[:number], number, every=1, agree=agree) for number in range(3)] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["refused", "failed"])
def test_choice_of_an_update_that_did_not_leave_is_charged_with_a_later_one(kind: str) -> None:
    assert choices_charged([line(kind, 0)], 1) == 1
    assert choices_charged([line(kind, 0), line(LEFT, 0)], 1) == 0, "it left when it was asked for again"
    assert choices_charged([line(LEFT, 0), line(kind, 3)], 4) == 1
    assert choices_charged([line(kind, 0), line(kind, 3)], 4) == 2
    assert choices_charged([line(kind, 1)], 2) == 0, "no choice was made in that round"


@pytest.mark.slow
def test_site_that_joined_later_or_took_part_in_other_experiments_is_not_charged() -> None:
    assert choices_charged([], 2) == 0
    assert choices_charged([line("refused", 0, OTHER)], 2) == 0
    assert choices_charged([line("refused", 0), line(LEFT, 0, OTHER)], 2) == 1
