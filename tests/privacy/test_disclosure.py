"""Everything a private run sends or records is charged, noised, withheld, or named as not covered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import Clients, play, toy_model, toy_run

from partita import report
from partita.core.client import ClientState, begin_round, finish_round
from partita.core.client_rule import ClientRule, Context, LayerSelection
from partita.core.data import Examples
from partita.core.dp_settings import PrivacySettings
from partita.core.method import Method
from partita.core.plan import Plan
from partita.core.rng import Key
from partita.core.rounds import initial_server, make_job
from partita.core.settings import Run
from partita.core.update import Update
from partita.experiment.config import parse
from partita.experiment.runner import start
from partita.methods.fedavg import fedavg
from partita.privacy.client_level import protect_clients
from partita.privacy.disclosure import LOST, OUTSIDE_ROWS, disclosed, withhold
from partita.record.row import QUANTITIES
from partita.training.local_training import train_clients

GUIDE = Path(__file__).resolve().parent.parent.parent / "docs" / "guide" / "privacy.md"
CONFIG: dict[str, Any] = {
    "data": {"name": "synthetic", "examples": 120, "size": 4, "test_examples": 30},
    "split": {"name": "iid", "clients": 3},
    "model": {"name": "vit", "layers": 2, "width": 8, "heads": 2, "patch": 2},
    "training": {"lr": 0.1, "optimizer": "sgd", "batch_size": 16},
    "rounds": 1,
}
PRIVACY = {unit: {"privacy": {"noise": 4.0, "accountant": "rdp", "unit": unit}} for unit in ("example", "client")}
PLAIN: dict[str, Any] = {}
SAFL = {"name": "safl", "k": 1, "noise": 4.0, "probe": 0.5}


def run_one_round(folder: Path, method: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    list(start(parse({**CONFIG, "method": method, **more}), folder))
    [line] = (folder / "rows.jsonl").read_text().splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def has_personal_scores(row: Mapping[str, Any]) -> bool:
    return bool(row["personal"])


@pytest.mark.slow
def test_every_row_key_has_a_disclosure_status(tmp_path: Path) -> None:
    runs: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = [
        ({"name": "fedavg"}, PLAIN),
        ({"name": "fedavg"}, PRIVACY["example"]),
        ({"name": "fedavg"}, PRIVACY["client"]),
        (SAFL, PRIVACY["example"]),
        ({"name": "fedavg"}, {**PRIVACY["client"], "secure_aggregation": {"min_clients": 2, "collusion": 0.0}}),
        (
            {"name": "fedavg"},
            {
                "data": {**CONFIG["data"], "domains": 2},
                "evaluate": {"validation_every": 1, "subgroups": "domain"},
                "split": {"name": "iid", "clients": 4, "unseen": 1},
                "sampling": {"name": "power_of_choice"},
            },
        ),
    ]
    seen = set[str]()
    for number, (method, privacy) in enumerate(runs):
        seen |= run_one_round(tmp_path / str(number), method, **privacy).keys()
    rare = {"refused", "bounded", "skipped", "by_type"}  # only in rounds with faulty clients, or with entities
    assert seen | rare == QUANTITIES.keys(), "a row has a key that is no field of record/row.py"


def test_private_rows_withhold_losses_drift_and_scores(tmp_path: Path) -> None:
    plain, example, client = (
        run_one_round(tmp_path / name, {"name": "fedavg"}, **privacy)
        for name, privacy in (("plain", PLAIN), ("example", PRIVACY["example"]), ("client", PRIVACY["client"]))
    )
    assert [row["train_loss"] is None for row in (plain, example, client)] == [False, True, True]
    assert [bool(row["drift"]) for row in (plain, example, client)] == [True, True, False]
    assert [has_personal_scores(row) for row in (plain, example, client)] == [True, True, False]
    assert [bool(row["test"]) for row in (plain, example, client)] == [True, True, True]
    for unit in ("example", "client"):
        told = json.loads((tmp_path / unit / "privacy.json").read_text())
        assert {key: told[key] for key in ("not_covered", "withheld")} == disclosed(unit)  # type: ignore[arg-type]
        page = report.page([report.load_run(tmp_path / unit)], tmp_path / f"{unit}.html").read_text()
        assert "Not covered by the guarantee" in page
    assert "Not covered" not in report.page([report.load_run(tmp_path / "plain")], tmp_path / "plain.html").read_text()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("method", "unit"), [("fedper", "client"), ("fedbabu", "example")])
def test_scores_of_models_trained_without_noise_are_withheld(tmp_path: Path, method: str, unit: str) -> None:
    """Personal models under client-level privacy, and heads tuned without noise before an evaluation."""
    plain = run_one_round(tmp_path / "plain", {"name": method})
    hidden = run_one_round(tmp_path / "private", {"name": method}, **PRIVACY[unit])
    assert plain["test"]
    assert has_personal_scores(plain)
    assert hidden["test"] is None
    assert hidden["personal"] is None
    report.page([report.load_run(tmp_path / "private")], tmp_path / "page.html")


def test_scores_of_noisy_personal_models_are_written(tmp_path: Path) -> None:
    row = run_one_round(tmp_path / "run", {"name": "fedper", "finetune": 0}, **PRIVACY["example"])
    assert row["test"]
    assert has_personal_scores(row)


def test_personal_scores_can_be_turned_off(tmp_path: Path) -> None:
    row = run_one_round(tmp_path / "run", {"name": "fedavg"}, **PRIVACY["example"], evaluate={"personal_every": 0})
    assert row["personal"] is None
    assert row["test"]


def test_client_level_rows_do_not_quote_failure_reasons(tmp_path: Path) -> None:
    away = {"federation": {"client_dropout": 0.6, "min_updates": 1}, "seed": 3}
    plain = run_one_round(tmp_path / "plain", {"name": "fedavg"}, **away)
    hidden = run_one_round(tmp_path / "client", {"name": "fedavg"}, **away, **PRIVACY["client"])
    assert plain["lost"]
    assert set(plain["lost"].values()) == {"dropped out (simulated)"}
    assert hidden["lost"] == dict.fromkeys(plain["lost"], LOST)


class UndeclaredMetric(ClientRule):
    """Reports a number computed from examples without declaring that it uses data."""

    def narrow(self, plan: Plan, probe: Examples, ctx: Context, key: Key) -> LayerSelection:
        return LayerSelection(plan.train, metrics={"targets": float(probe.take(key.permutation(8)).targets.sum())})


def update_of_one_client(run: Run) -> Update:
    job, _ = make_job(run, toy_model(), initial_server(run, toy_model()), 0, "a")
    each = begin_round(run, toy_model(), job, ClientState(), Clients(a=8)["a"].train)
    [learned] = train_clients(run, [each])
    return finish_round(run, each, learned)[0]


def test_private_updates_carry_no_loss_or_metrics() -> None:
    method = Method("telling", client_rules=(UndeclaredMetric(),))
    plain, hidden = (
        update_of_one_client(toy_run(method)),
        update_of_one_client(toy_run(protect_clients(method, 1.0, 1.0, 1))),
    )
    assert plain.metrics.keys() == {"targets"}
    assert plain.loss is not None
    assert (plain.weight, hidden.weight) == (8.0, 1.0)
    assert hidden.metrics == {}
    assert hidden.loss is None
    private = update_of_one_client(toy_run(replace(fedavg(), privacy=PrivacySettings(clip=1.0, noise=1.0))))
    assert private.loss is None
    assert private.weight == 8.0


def test_client_level_rounds_record_no_metrics() -> None:
    [played] = play(
        toy_run(protect_clients(Method("telling", client_rules=(UndeclaredMetric(),)), 1.0, 1.0, 1), count=1),
        toy_model(),
        Clients(a=8),
    )
    assert played.metrics == {}


def guide_table() -> Iterator[tuple[str, str, str]]:
    for line in GUIDE.read_text().splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        if (
            line.startswith("|")
            and len(cells) == 4
            and re.fullmatch(r"(public|charged|noised|withheld|named)", cells[1])
        ):
            yield cells[0], cells[1], cells[2]


def test_guide_table_matches_the_code() -> None:
    every = {**QUANTITIES, **OUTSIDE_ROWS}
    assert list(guide_table()) == [(what, each.example, each.client) for what, each in every.items()]


def test_withhold_empties_only_withheld_keys() -> None:
    """Mappings become empty mappings. Keys that are not listed stay."""
    row = {
        "round": 3,
        "train_loss": 0.5,
        "drift": {"all": 0.1},
        "bounded": {"a": 2.0},
        "lost": {"a": "a loss of 7.5"},
        "personal": {"mean": 0.5},
        "alarms": ["look at client a"],
        "note": "of my own",
    }
    before = {key: value.copy() if isinstance(value, dict) else value for key, value in row.items()}
    assert withhold(row, "example") == {**row, "train_loss": None}
    assert withhold(row, "client") == {
        "round": 3,
        "train_loss": None,
        "drift": {},
        "bounded": {},
        "lost": {"a": LOST},
        "personal": {},
        "alarms": None,
        "note": "of my own",
    }
    assert row == before, "the given row is not modified"


def test_alarm_on_the_central_test_is_kept_under_client_level_privacy() -> None:
    alarms = {"one predicted class": "the model predicts '1'", "outlying update": "the update norm of c1"}
    assert withhold({"alarms": alarms}, "client") == {"alarms": {"one predicted class": "the model predicts '1'"}}
    assert withhold({"alarms": alarms}, "example") == {"alarms": alarms}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("unit", ["example", "client"])
def test_private_run_records_no_split(unit: str, tmp_path: Path) -> None:
    run_one_round(tmp_path / "plain", {"name": "fedavg"})
    run_one_round(tmp_path / "private", {"name": "fedavg"}, **PRIVACY[unit])
    assert (tmp_path / "plain" / "split.json").exists()
    assert not (tmp_path / "private" / "split.json").exists()
    page = report.page([report.load_run(tmp_path / "private")], tmp_path / "page.html").read_text()
    assert "a private run does not record its clients&#39; numbers of examples and labels" in page


def test_privacy_record_lists_uncovered_and_withheld_quantities() -> None:
    for unit in ("example", "client"):
        found = disclosed(unit)
        for what, quantity in {**QUANTITIES, **OUTSIDE_ROWS}.items():
            status = quantity.example if unit == "example" else quantity.client
            line = f"{what}: {quantity.why}"
            assert (line in found["not_covered"]) == (status == "named")
            assert (line in found["withheld"]) == (status == "withheld")
