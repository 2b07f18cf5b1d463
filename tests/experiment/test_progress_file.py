"""A run says in a file of its folder how far its round is, and never waits for that file or fails with it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import small_config, toy_run

from partita.core.client import Job
from partita.core.dp_settings import PrivacySettings
from partita.core.rounds import ClientFailure
from partita.core.tensors import Tensors
from partita.core.update import MaskedUpdate, SecureSum, Update
from partita.experiment import progress_file, run_folder
from partita.experiment.config import Config
from partita.experiment.progress_file import ProgressFile, ReplyCounter, record_progress
from partita.experiment.runner import resume, start
from partita.methods.fedavg import fedavg
from partita.record import file_names, forms
from partita.storage import atomic_files

NOTHING: Tensors = {}


RESULT: Any = None


def round_of(progress: ProgressFile, number: int, *clients: str) -> Iterator[None]:
    """A round whose second client is lost, as the loop tells of it; a step for each reply."""
    progress.waits()
    progress.begins(number, len(clients), len(clients))
    for place, client in enumerate(clients):
        progress.asks(Job(number, client, NOTHING, frozenset()))
        update = Update(client, NOTHING, {}, 1.0, {}, None)
        progress.receives(ClientFailure(client, "no " * 300) if place == 1 else update)
        yield
    progress.ends(RESULT)


class WithoutThread(ProgressFile):
    """A file that is only written when a test says so."""

    def waits(self) -> None:
        self.update(phase="waiting")


def progress_of(folder: Path, private: bool = False, **more: Any) -> ProgressFile:
    return WithoutThread(folder, replace(toy_run(fedavg()), rounds=9), private, **more)


def content(progress: ProgressFile) -> dict[str, Any]:
    progress._write()
    found: dict[str, Any] = forms.PROGRESS(json.loads(progress.path.read_text()), "it")
    return found


def test_the_file_follows_a_round(tmp_path: Path) -> None:
    progress = progress_of(tmp_path)
    assert content(progress)["phase"] == "waiting"
    replies = round_of(progress, 4, "a", "b", "c")
    next(replies)
    begun = content(progress)
    expected = {"state": "running", "phase": "training", "round": 4, "rounds": 9, "cohort": 3, "online": 3}
    assert begun == begun | expected | {"asked": 1, "replied": 1}
    next(replies)
    halfway = content(progress)
    assert halfway["clients"] == {"a": "replied", "b": "lost"}
    assert halfway["lost"].keys() == {"b"}
    assert len(halfway["lost"]["b"]) == progress_file.MAX_TEXT
    assert halfway["replied"] == 1
    assert len(list(replies)) == 1
    assert content(progress)["phase"] == "evaluating"
    assert "pace" not in begun
    next(round_of(progress, 5, "c"))
    after = content(progress)
    assert (after["round"], after["clients"], after["lost"]) == (5, {"c": "replied"}, {})
    assert after["pace"] >= 0
    progress.close("finished")
    assert not progress.path.exists()


def test_replies_are_counted_by_round_and_the_sum_is_none() -> None:
    told: list[tuple[int, int]] = []
    counter = ReplyCounter(lambda replies, cohort: told.append((replies, cohort)))
    for number in (0, 1):
        counter.begins(number, 5, 2)
        for client in "ab":
            counter.receives(MaskedUpdate(client))
        counter.receives(SecureSum(None, None, None, 2, {}, 0, {}))
    assert told == [(0, 2), (1, 2), (2, 2)] * 2


def test_waiting_for_remote_clients_shows_who_is_connected(tmp_path: Path) -> None:
    names = ["north"]
    progress = progress_of(tmp_path, connected=lambda: names)
    assert (content(progress)["online"], content(progress)["present"]) == (1, ["north"])


def test_the_file_names_a_bounded_number_of_clients(tmp_path: Path) -> None:
    many = [f"c{number}" for number in range(progress_file.NAMED + 50)]
    progress = progress_of(tmp_path, connected=lambda: many)
    progress.begins(0, len(many), len(many))
    for client in many:
        progress.asks(Job(0, client, NOTHING, frozenset()))
        progress.receives(ClientFailure(client, "away"))
    told = content(progress)
    assert told["asked"] == told["online"] == len(many)
    assert len(told["clients"]) == len(told["lost"]) == len(told["present"]) == progress_file.NAMED


def test_a_private_run_does_not_tell_of_clients_or_quote_an_error(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    progress = progress_of(tmp_path / "toy", private=True, connected=lambda: ["a"])
    list(round_of(progress, 0, "a", "b"))
    told = content(progress)
    assert told.keys() == {"state", "phase", "rounds", "round", "started", "updated", "process"}
    config = replace(small_config("fedavg", 2), privacy=PrivacySettings(noise=4.0, accountant="rdp"))
    error = fail_in_the_second_round(config, tmp_path / "run")
    assert (error["state"], error["error"]) == ("failed", "ZeroDivisionError")


def fail_in_the_second_round(config: Config, folder: Path) -> dict[str, Any]:
    """What the file says after a failure in a run of this config, which must have begun to train."""

    def on_reply(replies: int, cohort: int) -> None:
        if (folder / file_names.ROWS).exists():
            raise ZeroDivisionError("with value 42")

    with pytest.raises(ZeroDivisionError):
        list(start(config, folder, on_reply=on_reply))
    found: dict[str, Any] = forms.PROGRESS(json.loads((folder / file_names.PROGRESS).read_text()), "it")
    return found


def test_a_failed_run_says_why_and_a_resumed_and_finished_one_has_no_progress(tmp_path: Path) -> None:
    config = small_config("fedavg", 3)
    told = fail_in_the_second_round(config, tmp_path)
    assert (told["state"], told["error"], told["round"]) == ("failed", "ZeroDivisionError: with value 42", 0)
    rows = resume(config, tmp_path)
    next(rows)
    rows.close()
    assert json.loads((tmp_path / file_names.PROGRESS).read_text())["state"] == "stopped"
    list(resume(config, tmp_path))
    assert run_folder.finished(tmp_path)
    assert not (tmp_path / file_names.PROGRESS).exists()


def test_overwriting_a_run_deletes_its_progress(tmp_path: Path) -> None:
    fail_in_the_second_round(small_config("fedavg", 3), tmp_path)
    with run_folder.lock(tmp_path):
        run_folder.remove_run(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".lock"]


def test_a_file_that_cannot_be_written_is_a_warning_in_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = progress_of(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise atomic_files.DiskError("no space left")

    monkeypatch.setattr(progress_file, "write", full)
    with pytest.warns(UserWarning, match=r"cannot write .*progress.json \(no space left\), so 'partita watch'"):  # noqa: PT031
        progress._write()
        progress.begins(0, 1, 1)
    progress.begins(1, 1, 1)  # once is enough


def test_only_the_thread_of_the_file_touches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers = set[str]()
    written = threading.Event()

    def write(path: Path, data: bytes, sync: bool) -> None:
        assert not sync
        writers.add(threading.current_thread().name)
        written.set()

    monkeypatch.setattr(progress_file, "write", write)
    with record_progress(tmp_path, toy_run(fedavg()), private=False) as progress:
        list(round_of(progress, 0, "a"))
        assert written.wait(10)
    assert writers == {"progress"}
    assert all(thread.name != "progress" for thread in threading.enumerate())


def test_a_run_that_has_no_round_to_run_only_deletes_old_progress(tmp_path: Path) -> None:
    progress_of(tmp_path)._write()
    assert os.listdir(tmp_path) == [file_names.PROGRESS]
    with record_progress(tmp_path, toy_run(fedavg()), private=False):
        pass
    assert not os.listdir(tmp_path)
