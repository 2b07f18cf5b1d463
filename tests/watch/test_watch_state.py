"""What the live page knows follows the run folders as they grow, shrink, break and vanish."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import small_config
from report_fixtures import write_run

from partita.experiment.runner import start
from partita.storage.processes import this_process
from partita.watch import state, watched_run
from partita.watch.state import Watcher


class Looker(Watcher):
    """A watcher that looks and searches whenever it is asked."""

    def ask(self, since: int = 0) -> dict[str, Any]:
        self.looked = self.searched = -1e9
        self.look()
        return self.state(since)

    def only(self, since: int = 0) -> dict[str, Any]:
        [run] = self.ask(since)["runs"]
        found: dict[str, Any] = run
        return found


def progress(folder: Path, **values: Any) -> None:
    told = {"state": "running", "phase": "training", "updated": time.time(), "process": this_process(), **values}
    (folder / "progress.json").write_text(json.dumps(told))


def append(folder: Path, **row: Any) -> None:
    with (folder / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_a_recorded_run_is_shown_with_its_curves_and_sums(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedprox", 1, rounds=16)
    run = Looker([tmp_path]).only()
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert (run["label"], run["seed"], run["state"], run["done"], run["rounds"]) == ("fedprox", 1, "finished", 16, 16)
    curve = run["curves"]["test/accuracy"]
    assert curve["rounds"] == list(range(16))
    assert curve["values"] == [row["test"]["accuracy"] for row in rows]
    assert curve["percent"]
    assert run["up"] == sum(row["bytes"]["up"] for row in rows)
    assert run["best"] == max(((row["round"], row["test"]["accuracy"]) for row in rows), key=lambda pair: pair[1])
    assert run["score"] == (15, rows[-1]["test"]["accuracy"])
    assert run["lost_count"] == 1
    assert run["lost"] == [
        {"client": run["lost"][0]["client"], "times": 1, "round": 4, "reason": "loss is nan after 12 steps"}
    ]
    assert {role["role"] for role in run["plan"]["roles"]} >= {"query", "head", "mlp"}


def test_only_new_points_are_sent_and_only_new_bytes_are_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedavg", 0, rounds=3, finished=False)
    watcher = Looker([tmp_path])
    before = watcher.ask()["version"]
    assert watcher.ask(before)["runs"] == []
    [run] = watcher.runs.values()
    before = watcher.version
    append(folder, round=3, test={"accuracy": 0.5})
    read = run.refresh(watcher.version + 1, 10**6, time.time())
    assert read < 100
    watcher.version += 1
    [told] = watcher.state(before)["runs"]
    assert not told["reset"]
    assert told["curves"]["test/accuracy"]["rounds"] == [3]
    assert told["done"] == 4


def test_a_half_written_row_waits_for_its_end(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedavg", 0, rounds=2, finished=False)
    watcher, line = Looker([tmp_path]), json.dumps({"round": 2, "test": {"accuracy": 0.25}}) + "\n"
    for part, done in ((line[:9], 2), (line[9:20], 2), (line[20:], 3)):
        with (folder / "rows.jsonl").open("a") as file:
            file.write(part)
        watcher.ask()
        assert next(iter(watcher.runs.values())).done == done


def test_a_resumed_run_that_drops_rows_starts_its_curves_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedavg", 0, rounds=5, finished=False)
    watcher = Looker([tmp_path])
    version = watcher.ask()["version"]
    lines = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
    (folder / "rows.jsonl").write_text("".join(lines[:2]))
    run = watcher.only(version)
    assert run["reset"]
    assert run["done"] == 2
    assert run["curves"]["test/accuracy"]["rounds"] == [0, 1]
    append(folder, round=2, test={"accuracy": 0.9})
    assert watcher.only(watcher.version)["curves"]["test/accuracy"]["rounds"] == [2]


def test_another_run_in_the_same_folder_is_a_new_run(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, rounds=5)
    watcher = Looker([tmp_path])
    version = watcher.ask()["version"]
    (tmp_path / "fedavg-0").rename(tmp_path / "old")
    other = write_run(tmp_path, "fedprox", 0, rounds=3, finished=False)
    other.rename(tmp_path / "fedavg-0")
    told = {run["name"]: run for run in watcher.ask(version)["runs"]}
    assert (told["fedavg-0"]["label"], told["fedavg-0"]["done"], told["fedavg-0"]["reset"]) == ("fedprox", 3, True)
    for name in ("old", "fedavg-0"):
        for file in (tmp_path / name).iterdir():
            file.unlink()
        (tmp_path / name).rmdir()
    assert watcher.ask()["ids"] == []


def test_runs_appear_when_their_folder_does(tmp_path: Path) -> None:
    watcher = Looker([tmp_path / "runs"])
    assert watcher.ask()["ids"] == []
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
    assert ("current" in run) == (expected in ("running", "waiting"))
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
    assert run["online"] == 9
    current = run["current"]
    assert (current["round"], current["cohort"], current["replied"], current["started"]) == (3, 5, 2, 12.0)
    assert current["clients"] == [("a", "replied"), ("b", "lost")]
    assert current["lost"] == {"b": "away"}


def test_epsilon_and_withheld_values_of_a_private_run(tmp_path: Path) -> None:
    def hide(row: dict[str, Any]) -> dict[str, Any]:
        spent = {"epsilon": 0.5 * (row["round"] + 1), "delta": 1e-5, "signal": {}}
        return {**row, "train_loss": None, "drift": {}, "personal": None, "lost": {}, "alarms": {}, "privacy": spent}

    folder = write_run(tmp_path, "fedavg", 0, rounds=3, finished=False, edit=hide)
    (folder / "privacy.json").write_text(json.dumps({"unit": "client", "budget": 4.0, "planned": 3.9}))
    run = Looker([tmp_path]).only()
    assert (run["privacy"]["spent"], run["privacy"]["left"], run["privacy"]["limit"]) == (1.5, 2.5, 4.0)
    assert run["curves"].keys() & {"train_loss", "drift", "personal/accuracy/mean"} == set()
    assert run["curves"]["privacy/epsilon"]["values"] == [0.5, 1.0, 1.5]


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
    good, bad = watcher.ask()["runs"]
    assert good["state"] == "finished"
    assert bad["state"] == "unreadable"
    assert bad["curves"] == {}
    assert name in bad["note"]
    version = watcher.version
    assert watcher.ask(version)["runs"] == []  # it is not read again until it changes
    if repaired is not None:
        (broken / name).write_bytes(repaired)
        assert watcher.only(version)["done"] == 16


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.toml").write_text('label = "secret"\nseed = 0\n')
    runs = tmp_path / "runs"
    linked, piped = write_run(runs, "a", 0), write_run(runs, "b", 0)
    (linked / "config.toml").unlink()
    (linked / "config.toml").symlink_to(tmp_path / "secret.toml")
    (piped / "rows.jsonl").unlink()
    os.mkfifo(piped / "rows.jsonl")
    (runs / "loop").symlink_to(runs)
    told = Looker([runs]).ask()["runs"]
    assert [run["state"] for run in told] == ["unreadable", "unreadable"]
    assert "secret" not in json.dumps([run["label"] for run in told])


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_run, "MAX_LINE_BYTES", 5000)
    folder = write_run(tmp_path, "fedavg", 0)
    with (folder / "rows.jsonl").open("wb") as file:
        file.write(b"{" * 10_000)
    run = Looker([tmp_path]).only()
    assert "a line of more than 5,000 bytes" in run["note"]


def test_numbers_that_json_does_not_have_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedavg", 0, rounds=1, finished=False)
    with (folder / "rows.jsonl").open("a") as file:
        file.write('{"round": 1, "seconds": Infinity, "test": {"accuracy": NaN}, "bytes": {"up": 1e400}}\n')
    progress(folder, pace=float("inf"), started=float("nan"), updated=time.time())
    json.dumps(Looker([tmp_path]).ask(), allow_nan=False)


def test_long_curves_are_thinned_and_many_metrics_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_run, "MAX_POINTS", 10)
    monkeypatch.setattr(watched_run, "MAX_CURVES", 5)
    folder = write_run(tmp_path, "fedavg", 0, rounds=1, finished=False)
    (folder / "rows.jsonl").write_text("")
    for round in range(100):
        append(folder, round=round, test={f"metric {number}": 0.5 for number in range(50)})
    curves = Looker([tmp_path]).only()["curves"]
    assert len(curves) == 5
    for curve in curves.values():
        assert 5 <= len(curve["rounds"]) <= 10
        assert (curve["rounds"][0], curve["rounds"][-1]) == (0, 99)
        assert curve["rounds"] == sorted(curve["rounds"])


def test_large_files_are_read_in_several_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        write_run(tmp_path, "fedavg", seed)
    monkeypatch.setattr(state, "READ_BYTES", (tmp_path / "fedavg-0" / "rows.jsonl").stat().st_size // 2)
    watcher = Looker([tmp_path])
    looks = 1
    while watcher.ask()["reading"]:
        looks += 1
        assert looks < 20
    assert looks > 3
    assert [run["done"] for run in watcher.ask()["runs"]] == [16, 16, 16]


@pytest.mark.slow
def test_a_hundred_runs_are_found_and_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100):
        write_run(tmp_path, "fedavg", seed, rounds=2)
    watcher = Looker([tmp_path])
    told = watcher.ask()
    assert [run["seed"] for run in told["runs"]] == list(range(100))
    assert not told["too_many"]
    monkeypatch.setattr(state, "MAX_RUNS", 10)
    assert (len(watcher.ask()["ids"]), watcher.ask()["too_many"]) == (10, True)


def plan_comparison(root: Path, *folders: str, **more: Any) -> None:
    runs = [{"folder": folder, "label": "fedavg", "seed": 7, "rounds": 16} for folder in folders]
    (root / "comparison.json").write_text(json.dumps({"runs": runs, "process": this_process(), **more}))


def test_runs_of_a_comparison_that_have_not_started_are_waiting(tmp_path: Path) -> None:
    write_run(tmp_path / "c", "fedavg", 0)
    plan_comparison(tmp_path / "c", "fedavg-0", "fedavg-1")
    watcher = Looker([tmp_path])
    started, waiting = watcher.ask()["runs"]
    assert (started["state"], waiting["state"], waiting["note"]) == ("finished", "waiting", "has not started")
    assert (waiting["name"], waiting["seed"], waiting["rounds"], waiting["done"]) == ("c/fedavg-1", 7, 16, 0)
    version = watcher.version
    assert watcher.ask(version)["runs"] == []
    write_run(tmp_path / "c", "fedavg", 1, rounds=2, finished=False)
    now = watcher.only(version)
    assert (now["id"], now["state"], now["done"]) == (waiting["id"], "running", 2)


def test_the_list_of_a_comparison_that_has_ended_or_is_broken_does_not_count(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0)
    plan_comparison(tmp_path, "fedavg-0", "fedavg-1", process={**this_process(), "pid": 2**22 - 5})
    assert len(Looker([tmp_path]).ask()["ids"]) == 1
    plan_comparison(tmp_path, runs=[{"folder": 3}])
    assert len(Looker([tmp_path]).ask()["ids"]) == 1


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
    assert run["lost"][0]["client"].startswith("\\x1b[31mx")
    assert (
        max(len(text) for each in (*run["lost"], *run["alarms"]) for text in each.values() if isinstance(text, str))
        <= 400
    )
    assert run["alarms"][0]["kind"] == "a\\u2028b"


def test_a_real_run_is_watched_without_a_change_to_its_folder(tmp_path: Path) -> None:
    rows = start(small_config("fedavg", 3), tmp_path / "run")
    watcher = Looker([tmp_path])
    for done in (1, 2, 3):
        next(rows)
        kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if "progress" not in path.name}
        run = watcher.only()
        assert (run["done"], run["rounds"]) == (done, 3)
        assert run["state"] in ("running", "waiting")
        assert run["plan"]["roles"]
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if "progress" not in path.name} == kept
    assert next(rows, None) is None
    assert watcher.only()["state"] == "finished"
