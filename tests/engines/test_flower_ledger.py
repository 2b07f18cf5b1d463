"""A site's privacy ledger on Flower: the site charges it before it replies, and tells the server nothing about it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flower_fixtures import FakeGrid, task_identity
from flwr.app import Context, Message, RecordDict
from helpers import SMALL_TASK, SMALL_VIT

from partita.core.client_rule import PrivacyRelease
from partita.engines.simulation import SimulationEngine
from partita.experiment import flower_app
from partita.experiment.config import load
from partita.privacy.ledger import Charge, Ledger, Limit

__all__ = ["task_identity"]
CONFIG = (
    """
rounds = 2
method = {name = "fedavg"}
[privacy]
noise = 1.5
[federation]
min_updates = 0
skip_failed_clients = true
[evaluate]
personal_every = 0
"""
    + SMALL_TASK
    + "test_examples = 20"
    + SMALL_VIT
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "experiment.toml").write_text(CONFIG)
    (tmp_path / "app").mkdir()
    return tmp_path / "experiment.toml"


def serve(config: Path, folder: Path, ledger: Path, rounds: int = 2, clients: int = 1) -> list[dict[str, Any]]:
    """The rows of a run with one site, whose node config names the ledger."""
    settings = {"folder": str(folder), "deadline": 60.0, "clients": clients, "set": ""}
    own = {"client": "c0", "folder": str(config.parent / "sites"), "engine.ledger": str(ledger)}

    def site(message: Message) -> Message:
        return flower_app.client(config)(message, Context(1, 1, own, RecordDict(), settings))  # type: ignore[arg-type]

    rows: Iterator[dict[str, Any]] = flower_app.serve(FakeGrid({1: site}), load(config), settings, folder.name)
    return [row for row, _ in zip(rows, range(rounds), strict=False)]


@pytest.mark.slow
def test_a_site_charges_its_own_client_once_for_each_round(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger.create(path, Limit(8.0, 1e-5))
    rows = serve(config, tmp_path / "run", path)
    assert "c0" not in rows[-1]["lost"]
    charges = Ledger.load(path).charges
    assert [(number, client) for _, number, client in charges] == [(0, "c0"), (1, "c0")]
    again = serve(config, tmp_path / "again", path)  # the same site and the same noise: the same release
    assert "c0" not in again[-1]["lost"]
    assert Ledger.load(path).charges == charges


@pytest.mark.slow
def test_a_site_refuses_a_run_that_its_ledger_does_not_allow(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(path, Limit(5.0, 1e-5))
    ledger.charge(Charge("another study", 0, "c0", (PrivacyRelease("training", 1.0, 1.0, 1),)))
    trained = []
    train = SimulationEngine.train
    monkeypatch.setattr(SimulationEngine, "train", lambda self, jobs: trained.append(1) or train(self, jobs))
    with caplog.at_level(logging.ERROR):
        rows = serve(config, tmp_path / "run", path)
    assert rows[0]["lost"]["c0"] == "the privacy ledger of the site does not allow round 0; see the site's log"
    assert not trained
    assert len(Ledger.load(path).charges) == 1
    assert "allows epsilon 5 at delta 1e-05" in caplog.text, "the site's own log says why"
    assert "epsilon" not in str(rows[0]["lost"])


@pytest.mark.slow
def test_a_charge_is_on_disk_before_a_site_trains(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger.create(path, replace(Limit(8.0, 1e-5)))
    seen = []
    train = SimulationEngine.train

    def watched(self: SimulationEngine, jobs: Any) -> Any:
        seen.append(len(Ledger.load(path).charges))
        return train(self, jobs)

    monkeypatch.setattr(SimulationEngine, "train", watched)
    serve(config, tmp_path / "run", path)
    assert seen == [1, 2]
