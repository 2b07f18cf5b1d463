"""The site's log notices every change, survives being killed, and takes writers at the same time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from itertools import permutations
from pathlib import Path

import pytest

from partita.site import site_log
from partita.site.site_log import FILE, START, LogError, SiteLog


@pytest.fixture
def log(tmp_path: Path) -> SiteLog:
    log = SiteLog(tmp_path / "state" / FILE)
    log.append("started", policy="ab")
    log.append("left", round=0, names=["head.weight"], bytes=7)
    log.append("refused", reason="not äpproved")
    return log


def test_each_line_follows_from_the_one_before(log: SiteLog) -> None:
    one, two, three = log.lines()
    assert (one["previous"], two["previous"], three["previous"]) == (START, one["hash"], two["hash"])
    assert [line["line"] for line in log.lines()] == [1, 2, 3]
    assert log.head() == three["hash"]
    assert log.verify().startswith("3 lines")
    assert log.verify(two["hash"]).endswith("the head that you noted is line 2")


@pytest.mark.slow
def test_every_change_of_one_byte_is_noticed(log: SiteLog) -> None:
    log.path.unlink()
    for kind in ("started", "left"):
        log.append(kind)
    whole = log.path.read_bytes()
    for place in range(len(whole)):
        for change in (bytes([whole[place] ^ 1]), b"", whole[place : place + 1] + b" "):
            log.path.write_bytes(whole[:place] + change + whole[place + 1 :])
            with pytest.raises(LogError):
                log.verify()
    log.path.write_bytes(whole)
    log.verify()


def test_removed_or_moved_line_is_noticed(log: SiteLog) -> None:
    lines = log.path.read_bytes().splitlines(keepends=True)
    orders = [order for order in permutations(lines) if order != tuple(lines)]
    for text in [*map(b"".join, orders), b"".join(lines[1:]), lines[0] + lines[2], b"".join([*lines, lines[2]])]:
        log.path.write_bytes(text)
        with pytest.raises(LogError, match=r"line \d does not follow from the line before it"):
            log.verify()


def test_lines_cut_off_at_the_end_are_noticed_with_a_noted_head_only(log: SiteLog) -> None:
    head = log.head()
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(b"".join(lines[:2]))
    log.verify()
    with pytest.raises(LogError, match="does not hold the head"):
        log.verify(head)
    log.append("left", round=1)
    with pytest.raises(LogError, match="does not hold the head"):
        log.verify(head)


def test_log_that_is_written_again_is_noticed_with_a_noted_head(log: SiteLog) -> None:
    head = log.head()
    log.path.unlink()
    for kind in ("started", "left", "refused"):
        log.append(kind)
    log.verify()
    with pytest.raises(LogError, match="was written again"):
        log.verify(head)


def test_nothing_is_added_to_a_damaged_log(log: SiteLog) -> None:
    whole = log.path.read_bytes()
    changed = whole.replace(b'"bytes":7', b'"bytes":6')
    log.path.write_bytes(changed)
    with pytest.raises(LogError, match="line 2 was changed: its hash does not fit"):
        log.append("left")
    assert log.path.read_bytes() == changed


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_incomplete_last_line_is_kept_aside_and_said(log: SiteLog, cut: int) -> None:
    whole = log.path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    log.path.write_bytes(whole[:-cut])
    with pytest.raises(LogError, match="line 3 is incomplete"):
        log.verify()
    log.append("started")
    [torn] = log.path.parent.glob("*.torn-*")
    assert torn.read_bytes() == last[:-cut]
    assert [line["kind"] for line in log.lines()] == ["started", "left", "torn", "started"]
    assert torn.name in log.lines()[2]["reason"]
    log.verify()


def _write_lines(path: Path, name: str) -> None:
    for number in range(20):
        SiteLog(path).append("left", who=name, number=number)


def test_writers_at_the_same_time_make_one_chain(tmp_path: Path) -> None:
    path = tmp_path / FILE
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_lines, args=(path, f"w{number}")) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = SiteLog(path).lines()
    assert len(lines) == 80
    for name in {line["who"] for line in lines}:
        assert [line["number"] for line in lines if line["who"] == name] == list(range(20))


@pytest.mark.slow
def test_killed_in_the_middle_of_a_write(tmp_path: Path) -> None:
    path = tmp_path / FILE
    # Each write is of one byte, so that the kill hits a line in the middle.
    code = f"""
import os, time
from pathlib import Path
from partita.site import site_log
from partita.storage import atomic_files

def slowly(path, data):
    with open(path, "ab", buffering=0) as file:
        for byte in data:
            file.write(bytes([byte]))
            time.sleep(0.001)

log = site_log.SiteLog(Path({str(path)!r}))
log.append("started")
atomic_files.append = slowly
while True:
    log.append("left", names=["x"] * 20)
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        while not path.exists() or path.stat().st_size < 1000 or path.read_bytes().endswith(b"\n"):
            assert process.poll() is None
            time.sleep(0.001)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    log = SiteLog(path)
    complete = path.read_bytes().count(b"\n")
    assert len(log.lines()) == complete
    log.append("started")
    assert log.path.read_bytes().endswith(b"\n")
    log.verify()


def test_line_is_on_disk_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    sync = os.fsync
    monkeypatch.setattr(site_log.atomic_files.os, "fsync", lambda handle: (synced.append(handle), sync(handle))[1])
    SiteLog(tmp_path / FILE).append("left")
    assert synced
