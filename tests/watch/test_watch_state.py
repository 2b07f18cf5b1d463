"""What the live page knows follows the run folders as they grow, shrink, break and vanish."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import small_config
from report_fixtures import write_run

from partita.experiment.runner import start
from partita.report.load import RunRecord, load_run, load_runs
from partita.report.page import document
from partita.storage import atomic_files
from partita.storage.processes import this_process
from partita.watch import state
from partita.watch.state import Watcher


class Looker(Watcher):
    """A watcher that looks and searches whenever it is asked."""

    def ask(self) -> list[dict[str, Any]]:
        self.looked = self.searched = -1e9
        self.look()
        runs: list[dict[str, Any]] = self.state()["runs"]
        return runs

    def only(self) -> dict[str, Any]:
        [run] = self.ask()
        return run


def progress(folder: Path, **values: Any) -> None:
    told = {"state": "running", "phase": "training", "updated": time.time(), "process": this_process(), **values}
    (folder / "progress.json").write_text(json.dumps(told))


def append(folder: Path, **row: Any) -> None:
    with (folder / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_a_recorded_run_is_shown_with_its_scores_and_in_the_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedprox", 1, rounds=16)
    watcher = Looker([tmp_path])
    run = watcher.only()
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert (run["label"], run["seed"], run["state"], run["done"], run["rounds"]) == ("fedprox", 1, "finished", 16, 16)
    assert run["best"] == max(((row["round"], row["test"]["accuracy"]) for row in rows), key=lambda pair: pair[1])
    assert run["score"] == (15, rows[-1]["test"]["accuracy"])
    pages = document(load_runs([tmp_path]), "Runs so far"), watcher.report()
    expected, shown = (re.sub(r"[-\d]+ [:\d]+ UTC", "", text) for text in pages)
    assert shown == expected


def test_a_folder_is_read_again_only_if_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Path] = []

    def load(folder: Path) -> RunRecord:
        loaded.append(folder)
        return load_run(folder)

    monkeypatch.setattr(state, "load_run", load)
    folder, other = (write_run(tmp_path, "fedavg", seed, rounds=3, finished=False) for seed in range(2))
    watcher = Looker([tmp_path])
    watcher.ask()
    before, report = watcher.version, watcher.report()
    assert loaded == [folder, other]
    progress(folder)
    watcher.ask()
    assert (watcher.version, watcher.report() is report) == (before, True), "the report does not show progress"
    append(folder, round=3, test={"accuracy": 0.5})
    assert [run["done"] for run in watcher.ask()] == [4, 3]
    assert loaded == [folder, other, folder]
    assert watcher.version > before
    assert watcher.report() != report


def test_a_half_written_row_waits_for_its_end(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedavg", 0, rounds=2, finished=False)
    watcher, line = Looker([tmp_path]), json.dumps({"round": 2, "test": {"accuracy": 0.25}}) + "\n"
    for part, done in ((line[:9], 2), (line[9:20], 2), (line[20:], 3)):
        with (folder / "rows.jsonl").open("a") as file:
            file.write(part)
        assert watcher.only()["done"] == done


def test_a_resumed_run_that_drops_rows_is_read_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedavg", 0, rounds=5, finished=False)
    watcher = Looker([tmp_path])
    assert watcher.only()["done"] == 5
    lines = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
    (folder / "rows.jsonl").write_text("".join(lines[:2]))
    assert watcher.only()["done"] == 2
    append(folder, round=2, test={"accuracy": 0.9})
    assert watcher.only()["score"] == (2, 0.9)


def test_another_run_in_the_same_folder_is_a_new_run(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, rounds=5)
    watcher = Looker([tmp_path])
    watcher.ask()
    (tmp_path / "fedavg-0").rename(tmp_path / "old")
    other = write_run(tmp_path, "fedprox", 0, rounds=3, finished=False)
    other.rename(tmp_path / "fedavg-0")
    told = {run["name"]: run for run in watcher.ask()}
    assert (told["fedavg-0"]["label"], told["fedavg-0"]["done"]) == ("fedprox", 3)
    for name in ("old", "fedavg-0"):
        for file in (tmp_path / name).iterdir():
            file.unlink()
        (tmp_path / name).rmdir()
    assert watcher.ask() == []


def test_runs_appear_when_their_folder_does(tmp_path: Path) -> None:
    watcher = Looker([tmp_path / "runs"])
    assert watcher.ask() == []
    write_run(tmp_path / "runs" / "compare", "fedavg", 0)
    assert watcher.only()["name"] == "compare/fedavg-0"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"phase": "training"}, "running"),
        ({"phase": "waiting"}, "waiting"),
        ({"state": "failed", "error": "RunError: why"}, "failed"),
        ({"state": "stopped"}, "stopped"),
        ({"updated": time.time() - 1000}, "stale"),
        ({"process": {**this_process(), "pid": 2**22 - 5}}, "stale"),
    ],
)
def test_the_state_follows_from_progress_and_process(tmp_path: Path, told: dict[str, Any], expected: str) -> None:
    folder = write_run(tmp_path, "fedavg", 0, rounds=3, finished=False)
    progress(folder, **told)
    run = Looker([tmp_path]).only()
    assert run["state"] == expected
    assert bool(run["round"]["phase"]) == (expected in ("running", "waiting"))
    assert run["note"] == "RunError: why" or expected != "failed"


def test_a_run_without_progress_counts_by_its_last_change(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedavg", 0, rounds=3, finished=False)
    assert Looker([tmp_path]).only()["state"] == "running"
    for name in ("rows.jsonl", "config.toml"):
        os.utime(folder / name, (1e9, 1e9))
    assert Looker([tmp_path]).only()["state"] == "stopped"
    (folder / "rows.jsonl").unlink()
    (folder / "checksums.json").write_text("{}")
    os.utime(folder / "config.toml")
    assert Looker([tmp_path]).only()["state"] == "waiting"


def test_a_run_that_stopped_early_says_why(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedavg", 0, rounds=3)
    (folder / "result.json").write_text(json.dumps({"stopped": {"after": 3, "reason": "enough"}}))
    assert Looker([tmp_path]).only()["note"] == "stopped after round 3: enough"


def test_the_current_round_and_the_time_of_a_round_come_from_progress(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedavg", 0, rounds=3, finished=False)
    progress(
        folder, round=3, cohort=5, asked=4, replied=2, pace=7.5, started=12.0, online=9,
        clients={"a": "replied", "b": "lost"}, lost={"b": "away"},
    )  # fmt: skip
    run = Looker([tmp_path]).only()
    assert run["pace"] == 7.5
    current = run["round"]
    assert (current["round"], current["cohort"], current["replied"], current["started"]) == (3, 5, 2, 12.0)
    assert current["online"] == 9
    assert run["lost"] == ["b: away"]


def test_epsilon_of_a_private_run(tmp_path: Path) -> None:
    def hide(row: dict[str, Any]) -> dict[str, Any]:
        spent = {"epsilon": 0.5 * (row["round"] + 1), "delta": 1e-5, "signal": {}}
        return {**row, "train_loss": None, "drift": {}, "personal": None, "lost": {}, "alarms": {}, "privacy": spent}

    write_run(tmp_path, "fedavg", 0, rounds=3, finished=False, edit=hide)
    run = Looker([tmp_path]).only()
    assert (run["epsilon"], run["lost"]) == (1.5, [])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", b"[1]\n"),
        ("rows.jsonl", b'{"round": 0}\n{"round": 0}\n'),
        ("rows.jsonl", b'{"round": 0, "test": {"accuracy": "high"}}\n'),
        ("rows.jsonl", b"[" * 100_000 + b"\n"),
        ("config.toml", b"label = 3"),
        ("config.toml", b"\xff"),
        ("plan.json", b"[]"),
        ("progress.json", b'{"state": 1}'),
        ("progress.json", b'{"state": "running", "process": {"pid": "all"}}'),
        ("result.json", b"no"),
        ("privacy.json", b'{"budget": "much"}'),
    ],
)
def test_a_broken_folder_is_named_and_the_others_are_shown(tmp_path: Path, name: str, content: bytes) -> None:
    write_run(tmp_path, "fedavg", 0)
    broken = write_run(tmp_path, "fedprox", 0)
    repaired = (broken / name).read_bytes() if (broken / name).exists() else None
    (broken / name).write_bytes(content)
    watcher = Looker([tmp_path])
    good, bad = watcher.ask()
    assert good["state"] == "finished"
    assert bad["state"] == "unreadable"
    assert (bad["done"], bad["score"]) == (0, None)
    assert name in bad["note"]
    assert "fedavg" in watcher.report()
    if repaired is not None:
        (broken / name).write_bytes(repaired)
        assert [run["done"] for run in watcher.ask()] == [16, 16]


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.toml").write_text('label = "secret"\nseed = 0\n')
    runs = tmp_path / "runs"
    linked, piped = write_run(runs, "a", 0), write_run(runs, "b", 0)
    (linked / "config.toml").unlink()
    (linked / "config.toml").symlink_to(tmp_path / "secret.toml")
    (piped / "rows.jsonl").unlink()
    os.mkfifo(piped / "rows.jsonl")
    (runs / "loop").symlink_to(runs)
    told = Looker([runs]).ask()
    assert [run["state"] for run in told] == ["unreadable", "unreadable"]
    assert "secret" not in json.dumps([run["label"] for run in told])


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_files, "MAX_LINE_BYTES", 5000)
    folder = write_run(tmp_path, "fedavg", 0)
    with (folder / "rows.jsonl").open("wb") as file:
        file.write(b"{" * 10_000)
    run = Looker([tmp_path]).only()
    assert "has more than 5,000 bytes" in run["note"]


def test_numbers_that_json_does_not_have_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedavg", 0, rounds=1, finished=False)
    with (folder / "rows.jsonl").open("a") as file:
        file.write('{"round": 1, "seconds": Infinity, "test": {"accuracy": NaN}, "bytes": {"up": 1e400}}\n')
    progress(folder, pace=float("inf"), started=float("nan"), updated=time.time())
    json.dumps(Looker([tmp_path]).ask(), allow_nan=False)


def test_runs_with_other_metrics_are_named_in_place_of_a_report(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0)
    other = write_run(tmp_path, "<b>", 0)
    plan = json.loads((other / "plan.json").read_text())
    metric = {"name": "perplexity", "higher_is_better": False, "fraction": False}
    (other / "plan.json").write_text(json.dumps({**plan, "metric": metric, "metrics": [metric]}))
    watcher = Looker([tmp_path])
    watcher.ask()
    assert "report them separately" in watcher.report()
    assert "<b>" not in watcher.report()


@pytest.mark.slow
def test_a_hundred_runs_are_found_and_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100):
        write_run(tmp_path, "fedavg", seed, rounds=2)
    watcher = Looker([tmp_path])
    assert [run["seed"] for run in watcher.ask()] == list(range(100))
    assert not watcher.too_many
    monkeypatch.setattr(state, "MAX_RUNS", 10)
    assert (len(watcher.ask()), watcher.too_many) == (10, True)


def plan_comparison(root: Path, *folders: str, **more: Any) -> None:
    runs = [{"folder": folder, "label": "fedavg", "seed": 7, "rounds": 16} for folder in folders]
    (root / "comparison.json").write_text(json.dumps({"runs": runs, "process": this_process(), **more}))


def test_runs_of_a_comparison_that_have_not_started_are_waiting(tmp_path: Path) -> None:
    write_run(tmp_path / "c", "fedavg", 0)
    plan_comparison(tmp_path / "c", "fedavg-0", "fedavg-1")
    watcher = Looker([tmp_path])
    started, waiting = watcher.ask()
    assert (started["state"], waiting["state"], waiting["note"]) == ("finished", "waiting", "has not started")
    assert (waiting["name"], waiting["seed"], waiting["rounds"], waiting["done"]) == ("c/fedavg-1", 7, 16, 0)
    write_run(tmp_path / "c", "fedavg", 1, rounds=2, finished=False)
    _, now = watcher.ask()
    assert (now["name"], now["state"], now["done"]) == (waiting["name"], "running", 2)


def test_the_list_of_a_comparison_that_has_ended_or_is_broken_does_not_count(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0)
    plan_comparison(tmp_path, "fedavg-0", "fedavg-1", process={**this_process(), "pid": 2**22 - 5})
    assert len(Looker([tmp_path]).ask()) == 1
    plan_comparison(tmp_path, runs=[{"folder": 3}])
    assert len(Looker([tmp_path]).ask()) == 1


@pytest.mark.parametrize("path", ["../../secret", "/etc", "a/../../../secret"])
def test_a_planned_run_elsewhere_is_not_read(tmp_path: Path, path: str) -> None:
    write_run(tmp_path / "secret", "hidden", 0)
    (tmp_path / "a" / "runs").mkdir(parents=True)
    plan_comparison(tmp_path / "a" / "runs", path)
    assert "hidden" not in json.dumps(Looker([tmp_path / "a" / "runs"]).ask())


def test_texts_from_a_folder_are_printable_and_short(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedavg", 0, rounds=1, finished=False)
    append(folder, round=1, lost={"\x1b[31m" + "x" * 9999: "\u202e" * 9999}, alarms={"a\u2028b": "c" * 9999})
    run = Looker([tmp_path]).only()
    [lost], [alarm] = run["lost"], run["alarms"]
    assert lost.startswith("\\x1b[31mx")
    assert len(lost) <= 60 + 2 + 400
    assert alarm == "a\\u2028b"


def test_a_real_run_is_watched_without_a_change_to_its_folder(tmp_path: Path) -> None:
    rows = start(small_config("fedavg", 3), tmp_path / "run")
    watcher = Looker([tmp_path])
    for done in (1, 2, 3):
        next(rows)
        kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*") if "progress" not in path.name}
        run = watcher.only()
        assert (run["done"], run["rounds"]) == (done, 3)
        assert run["state"] in ("running", "waiting")
        assert "fedavg" in watcher.report()
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*") if "progress" not in path.name} == kept
    assert next(rows, None) is None
    assert watcher.only()["state"] == "finished"
