"""The queue of studies: order, failures, and the time limit, with stand-ins for runs."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest
from playing import queue
from playing.queue import Ended, Lengths, play_all
from playing.study import Planned
from study_fixtures import stand_in

STUDY = Path("small.toml")


def planned(arm: str, seed: int = 0) -> Planned:
    return Planned("small", STUDY, "run", arm, {}, seed, {}, {}, Path(), "0", "accuracy", "test")


def play(runs: list[Planned], work: Path, jobs: int = 1, **options: object) -> list[Ended]:
    return list(play_all(runs, jobs, work, play=stand_in, **options))  # type: ignore[arg-type]


@pytest.mark.slow
def test_one_process_plays_all_runs_in_order(tmp_path: Path) -> None:
    ended = play([planned("a", seed) for seed in range(4)], tmp_path)
    assert [each.planned.seed for each in ended] == [0, 1, 2, 3]
    assert len({each.line["process"] for each in ended if each.line}) == 1
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_failures_are_tried_once_more_and_the_others_go_on(tmp_path: Path) -> None:
    ended = play([planned("fails"), planned("fails once"), planned("dies"), planned("a")], tmp_path)
    good = {each.planned.arm for each in ended if each.line is not None}
    bad = [(each.planned.arm, each.last) for each in ended if each.line is None]
    assert good == {"fails once", "a"}
    assert sorted(bad) == [("dies", False), ("dies", True), ("fails", False), ("fails", True), ("fails once", False)]
    assert "exit code 7" in next(each.error for each in ended if each.planned.arm == "dies")
    assert "ValueError: wrong" in next(each.error for each in ended if each.planned.arm == "fails")
    tries = (tmp_path / "tries").read_text().splitlines()
    assert tries.count("fails 0 False") == tries.count("fails 0 True") == 1


@pytest.mark.slow
def test_a_run_that_failed_in_an_earlier_call_has_one_try_left(tmp_path: Path) -> None:
    ended = play([planned("fails")], tmp_path, tries={planned("fails").name: 1})
    assert [each.last for each in ended] == [True]


@pytest.mark.slow
def test_cores_are_shared_by_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue.os, "sched_getaffinity", lambda _: range(7), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ended = play([planned("a", seed) for seed in range(2)], tmp_path, jobs=2)
    assert {each.line["threads"] for each in ended if each.line} == {"3"}


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "threads"), [("1", "1"), ("16", "3"), ("no number", "3")])
def test_a_user_can_limit_the_threads_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, threads: str
) -> None:
    monkeypatch.setattr(queue.os, "sched_getaffinity", lambda _: range(7), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    ended = play([planned("a", seed) for seed in range(2)], tmp_path, jobs=2)
    assert {each.line["threads"] for each in ended if each.line} == {threads}


@pytest.mark.slow
def test_at_the_time_limit_what_runs_is_killed_and_what_ended_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(queue, "monotonic", lambda: clock[0])
    runs = play_all([planned("slow"), planned("a"), planned("a", 1)], 2, tmp_path, deadline=100.0, play=stand_in)
    assert next(runs).planned == planned("a")
    clock[0] = 101.0
    began = time.perf_counter()
    assert list(runs) == []
    assert time.perf_counter() - began < 60
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_running_process_is_killed_at_the_limit(tmp_path: Path) -> None:
    began = time.perf_counter()
    assert list(play_all([planned("slow")], 1, tmp_path, deadline=time.monotonic() + 2, play=stand_in)) == []
    assert 1.9 < time.perf_counter() - began < 30
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_no_run_starts_that_would_not_end_in_time(tmp_path: Path) -> None:
    lengths = Lengths()
    lengths.add(STUDY, "slow", 1000.0, earlier=True)
    lengths.add(STUDY, "a", 0.5, earlier=True)
    deadline = time.monotonic() + 100
    ended = play([planned("slow"), planned("a")], tmp_path, deadline=deadline, lengths=lengths)
    assert [each.planned.arm for each in ended] == ["a"]
    assert (tmp_path / "tries").read_text() == "a 0 False\n"


def test_lengths_of_this_call_count_more_than_earlier_ones() -> None:
    lengths = Lengths()
    assert lengths.expected(planned("a")) is None
    lengths.add(STUDY, "b", 7.0, earlier=True)
    assert lengths.expected(planned("a")) == 7.0, "another arm of the study is the next best guess"
    lengths.add(STUDY, "a", 100.0, earlier=True)
    lengths.add(STUDY, "a", 3.0)
    lengths.add(STUDY, "a", 2.0)
    assert lengths.expected(planned("a")) == 3.0
