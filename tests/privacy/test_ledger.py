"""The privacy ledger: it adds up over runs, refuses what would exceed it, and never counts too little."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting import pld
from typer.testing import CliRunner

from partita.core.client_rule import PrivacyRelease
from partita.engines.simulation import SimulationEngine
from partita.experiment import runner
from partita.experiment.config import Config, parse
from partita.experiment.run_ledger import RunLedger
from partita.experiment.runner import resume, start
from partita.privacy.ledger import Charge, Ledger, LedgerError, Limit
from partita.privacy.spending import TRAINING

LIMIT = Limit(8.0, 1e-6, "group", "patient_id")
STEPS = PrivacyRelease(TRAINING, noise=1.0, share=0.1, count=10)
CONFIG: dict[str, Any] = {
    "rounds": 3,
    "method": {"name": "fedavg"},
    "data": {"name": "synthetic", "examples": 60, "size": 4, "test_examples": 20, "classes": 2},
    "split": {"name": "iid", "clients": 2},
    "model": {"name": "vit", "layers": 1, "width": 8, "heads": 2, "patch": 2},
    "training": {"optimizer": "sgd", "batch_size": 8, "steps": 2},
    "privacy": {"noise": 1.5},
    "evaluate": {"personal_every": 0},
}


def private_config(ledger: Path, **changes: Any) -> Config:
    raw = {**CONFIG, "engine": {"ledger": str(ledger)}, **changes}
    return parse({key: value for key, value in raw.items() if value is not None})


def charge(run: str = "r", number: int = 0, client: str = "a", *releases: PrivacyRelease) -> Charge:
    return Charge(run, number, client, releases or (STEPS,), "digest")


def by_hand(delta: float, *releases: PrivacyRelease) -> float:
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4)
    for release in releases:
        event: Any = dp_accounting.GaussianDpEvent(release.noise)
        event = event if release.share == 1 else dp_accounting.PoissonSampledDpEvent(release.share, event)
        accountant.compose(event, release.count)
    return float(accountant.get_epsilon(delta))


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "ledger.jsonl", LIMIT)


# ---- sums


@pytest.mark.slow
def test_runs_are_composed_and_their_epsilons_are_not_added(ledger: Ledger) -> None:
    assert ledger.spent() == 0.0
    other = PrivacyRelease(TRAINING, noise=2.0, share=0.3, count=40)
    ledger.charge(charge("one"), charge("one", 1), charge("two", 0, "a", other))
    wanted = by_hand(1e-6, replace(STEPS, count=20), other)
    assert ledger.spent() == pytest.approx(wanted, rel=5e-3)
    assert ledger.spent() < by_hand(1e-6, replace(STEPS, count=20)) + by_hand(1e-6, other)
    assert Ledger.load(ledger.path).spent() == ledger.spent()


@pytest.mark.slow
def test_a_run_costs_as_much_as_its_most_expensive_client_and_names_of_clients_do_not_matter(ledger: Ledger) -> None:
    """The same patient may be at client a of one run and at client b of another."""
    ledger.charge(charge("one", 0, "a"), charge("one", 0, "b"))
    assert ledger.spent() == pytest.approx(by_hand(1e-6, STEPS), rel=5e-3), "clients of a run share no patient"
    ledger.charge(charge("two", 0, "c"))
    assert ledger.spent() == pytest.approx(by_hand(1e-6, replace(STEPS, count=20)), rel=5e-3)


@pytest.mark.slow
def test_clients_that_release_different_things_are_bounded_by_the_worst_at_each_order(ledger: Ledger) -> None:
    many, loud = replace(STEPS, share=0.02, count=400), PrivacyRelease(TRAINING, 2.5, 1.0, 1)
    for run in ("one", "two"):
        ledger.charge(charge(run, 0, "a", many), charge(run, 0, "b", loud))
    pairs = [by_hand(1e-6, first, second) for first in (many, loud) for second in (many, loud)]
    assert max(pairs) <= ledger.spent() < 1.3 * max(pairs)


def test_a_charge_counts_once(ledger: Ledger) -> None:
    ledger.charge(charge())
    size, spent = ledger.path.stat().st_size, ledger.spent()
    ledger.charge(charge(), charge())
    Ledger.load(ledger.path).charge(charge())
    assert (ledger.path.stat().st_size, ledger.spent()) == (size, spent)


def test_a_round_that_was_charged_with_something_else_is_refused(ledger: Ledger) -> None:
    """Less noise under the same key would be a second release with correlated noise."""
    ledger.charge(charge())
    with pytest.raises(LedgerError, match="released something else in round 0 of this run"):
        ledger.charge(charge("r", 0, "a", replace(STEPS, noise=0.5)))
    assert len(Ledger.load(ledger.path).charges) == 1


# ---- the limit


def _fits(ledger: Ledger, more: Charge) -> bool:
    try:
        ledger.charge(more)
    except LedgerError:
        return False
    return True


@pytest.mark.slow
def test_what_would_exceed_the_limit_is_refused_and_not_charged(ledger: Ledger) -> None:
    refused = r"allows epsilon 8 at delta 1e-06; 7\.\d+ is spent, and with this run it would"
    rounds = next(number for number in range(200) if not _fits(ledger, charge("r", number)))
    with pytest.raises(LedgerError, match=refused):
        ledger.charge(charge("r", rounds))
    assert ledger.spent() <= 8.0 < ledger.spent([charge("r", rounds)])
    assert len(Ledger.load(ledger.path).charges) == rounds


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_a_release_without_useful_noise_is_refused(ledger: Ledger, noise: float) -> None:
    with pytest.raises(LedgerError, match="allows epsilon 8"):
        ledger.charge(charge("r", 0, "a", replace(STEPS, noise=noise)))


@pytest.mark.parametrize(("unit", "group"), [("example", None), ("group", "visit_id"), ("client", None)])
def test_other_units_are_refused(ledger: Ledger, unit: str, group: str | None) -> None:
    ledger.check_unit("group", "patient_id")
    with pytest.raises(LedgerError, match=r"protects each group \('patient_id'\), but the run protects each"):
        ledger.check_unit(unit, group)


def test_impossible_limits_are_refused() -> None:
    for bad in ({"epsilon": 0.0}, {"epsilon": float("inf")}, {"delta": 0.0}, {"delta": 1.0}, {"epsilon": float("nan")}):
        with pytest.raises(LedgerError, match="the limit of a ledger"):
            Limit(**{"epsilon": 1.0, "delta": 1e-6, **bad})
    with pytest.raises(LedgerError, match="with the column of the groups"):
        Limit(1.0, 1e-6, "group")


# ---- the file


def test_a_ledger_is_never_replaced_and_never_made_silently(ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="exists already"):
        Ledger.create(ledger.path, replace(LIMIT, epsilon=100.0))
    with pytest.raises(LedgerError, match=r"there is no ledger .*create it with 'partita budget --ledger"):
        Ledger.load(tmp_path / "other.jsonl")
    with pytest.raises(LedgerError, match="there is no folder"):
        Ledger.create(tmp_path / "missing" / "ledger.jsonl", LIMIT)


def _raise_limit(lines: list[bytes]) -> list[bytes]:
    return [lines[0].replace(b"8.0", b"80.0"), *lines[1:]]


def _add_noise(lines: list[bytes]) -> list[bytes]:
    return [*lines[:-1], lines[-1].replace(b'"noise":1.0', b'"noise":9.0')]


@pytest.mark.parametrize(
    "forge",
    [
        _raise_limit,
        _add_noise,
        lambda lines: [lines[0], *lines[2:]],  # a charge is removed
        lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
        lambda lines: lines[1:],
        lambda lines: [*lines, b"{}\n"],
        lambda lines: [*lines, b"\xff\n"],
        lambda lines: [*lines, b"[]\n"],
        lambda lines: [],
    ],
)
def test_a_ledger_that_was_changed_is_refused(ledger: Ledger, forge: Callable[[list[bytes]], list[bytes]]) -> None:
    ledger.charge(*(charge("r", number) for number in range(3)))
    ledger.path.write_bytes(b"".join(forge(ledger.path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(LedgerError, match=r"(restore|compare) it (from|with) a copy"):
        Ledger.load(ledger.path)
    with pytest.raises(LedgerError, match=r"(restore|compare) it (from|with) a copy"):
        ledger.charge(charge("r", 9))


def test_an_append_that_was_cut_off_is_repaired(ledger: Ledger) -> None:
    """The process was killed before the line was complete, so before a reply left."""
    ledger.charge(charge("r", 0))
    whole = ledger.path.read_bytes()
    ledger.charge(charge("r", 1))
    line = ledger.path.read_bytes()[len(whole) :]
    for kept in (1, len(line) // 2, len(line) - 1):
        ledger.path.write_bytes(whole + line[:kept])
        found = Ledger.load(ledger.path)
        assert len(found.charges) == 1
        found.charge(charge("r", 2))
        assert [number for _, number, _ in Ledger.load(ledger.path).charges] == [0, 2]


def test_charges_that_vanish_while_the_ledger_is_open_are_noticed(ledger: Ledger) -> None:
    before = ledger.path.read_bytes()
    ledger.charge(charge("r", 0))
    ledger.path.write_bytes(before)
    with pytest.raises(LedgerError, match="lost charges"):
        ledger.charge(charge("r", 1))


def _charge_many(path: Path, run: str) -> None:
    own = Ledger.load(path)
    for number in range(10):
        own.charge(Charge(run, number, "a", (replace(STEPS, noise=20.0),)))


def test_processes_that_charge_at_the_same_time_lose_nothing(ledger: Ledger) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_charge_many, args=(ledger.path, f"run {number}")) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(Ledger.load(ledger.path).charges) == 30


# ---- runs


@pytest.fixture
def by_example(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.jsonl"
    Ledger.create(path, Limit(8.0, 1e-5))
    return path


@pytest.mark.slow
def test_a_run_is_charged_and_a_second_one_adds_up(by_example: Path, tmp_path: Path) -> None:
    rows = list(start(private_config(by_example), tmp_path / "one"))
    first = Ledger.load(by_example)
    assert len(first.charges) == 6  # three rounds of two clients
    assert first.spent() == pytest.approx(rows[-1]["privacy"]["epsilon"], rel=1e-6)
    list(start(private_config(by_example), tmp_path / "two"))
    both = Ledger.load(by_example)
    assert len({run for run, _, _ in both.charges}) == 2
    assert first.spent() < both.spent() < 2 * first.spent()


def test_a_run_that_would_exceed_the_limit_is_refused_before_training(tmp_path: Path) -> None:
    path = tmp_path / "small.jsonl"
    Ledger.create(path, Limit(3.0, 1e-5))
    with pytest.raises(LedgerError, match="with this run it would be"):
        list(start(private_config(path, rounds=40), tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    assert not Ledger.load(path).charges


def test_a_resumed_run_is_not_charged_twice(by_example: Path, tmp_path: Path) -> None:
    config = private_config(by_example)
    rows = start(config, tmp_path / "run")
    next(rows)
    rows.close()
    before = len(Ledger.load(by_example).charges)
    assert before in (2, 4)  # the second round may have started
    list(resume(config, tmp_path / "run"))
    assert len(Ledger.load(by_example).charges) == 6
    assert len({run for run, _, _ in Ledger.load(by_example).charges}) == 1


class Watched(SimulationEngine):
    """An engine that records how much was charged whenever a reply leaves it."""

    path: Path
    seen: list[int]

    def train(self, jobs: Any) -> Iterator[Any]:
        for reply in super().train(jobs):
            self.seen.append(len(Ledger.load(self.path).charges))
            yield reply


def test_a_charge_is_on_disk_before_the_reply_leaves(
    by_example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def watched(experiment: Any, store: Any) -> Watched:
        made = Watched(experiment.run, experiment.model, experiment.federation, store=store)
        made.path, made.seen = by_example, seen
        return made

    monkeypatch.setattr(runner, "build_engine", watched)
    list(start(private_config(by_example), tmp_path / "run"))
    assert seen == [1, 2, 3, 4, 5, 6]


def _killed_run(path: Path, folder: Path) -> None:
    replies = []

    def receives(self: RunLedger, reply: Any) -> None:
        replies.append(reply)
        if len(replies) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    RunLedger.receives = receives  # type: ignore[method-assign]
    list(start(private_config(path), folder))


@pytest.mark.slow
def test_a_killed_run_is_charged_for_every_reply(by_example: Path, tmp_path: Path) -> None:
    # A fork would inherit the locks of torch's threads, and could wait for them for ever.
    worker = multiprocessing.get_context("spawn").Process(target=_killed_run, args=(by_example, tmp_path / "run"))
    worker.start()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    assert len(Ledger.load(by_example).charges) == 2
    list(resume(private_config(by_example), tmp_path / "run"))
    assert len(Ledger.load(by_example).charges) == 6


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"privacy": {"noise": 0.0}}, "allows epsilon 8"),
    ],
)
def test_runs_that_a_ledger_cannot_account_for_are_refused(
    by_example: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(LedgerError, match=reason):
        list(start(private_config(by_example, **changes), tmp_path / "run"))


# ---- the command


@pytest.mark.slow
def test_budget_creates_and_shows_a_ledger(tmp_path: Path) -> None:
    from partita.cli.main import app

    path = tmp_path / "ledger.jsonl"
    made = CliRunner().invoke(
        app, ["budget", "--ledger", str(path), "--new", "--epsilon", "8", "--delta", "1e-6", "--group", "patient_id"]
    )
    assert made.exit_code == 0, made.exception
    Ledger.load(path).charge(charge("aaaa"), charge("aaaa", 1), charge("bbbb"))
    shown = CliRunner().invoke(app, ["budget", "--ledger", str(path)]).output
    assert "of 8 is spent at delta 1e-06" in shown
    assert "each group ('patient_id')" in shown
    as_json = json.loads(CliRunner().invoke(app, ["budget", "--ledger", str(path), "--json"]).output)
    assert as_json["limit"] == {"epsilon": 8.0, "delta": 1e-6, "unit": "group", "group": "patient_id"}
    assert [run["rounds"] for run in as_json["runs"]] == [2, 1]
    for wrong in (["--new"], ["--ledger", str(path), "--new"], ["--group", "x"], ["--out", "x"], ["--run", "x"]):
        assert CliRunner().invoke(app, ["budget", *wrong]).exception is not None
