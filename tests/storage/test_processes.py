"""Readers of a folder can tell whether the process that writes it is still there."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from partita.storage.processes import is_gone, this_process


def test_this_process_is_there_and_an_ended_one_is_not() -> None:
    here = this_process()
    assert here["pid"] == os.getpid()
    assert not is_gone(here)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert is_gone({**here, "pid": ended.pid})


def test_a_process_of_another_machine_may_still_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    elsewhere = {**this_process(), "pid": ended.pid}
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    assert not is_gone(elsewhere)


def test_a_process_of_another_user_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert not is_gone(this_process())


@pytest.mark.parametrize("pid", [0, -1, 2**31, 10**30, "1", None, 1.5])
def test_no_signal_goes_to_a_number_that_is_not_a_process(monkeypatch: pytest.MonkeyPatch, pid: object) -> None:
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a signal was sent"))
    assert not is_gone({**this_process(), "pid": pid})


@pytest.mark.skipif(platform.system() != "Linux", reason="only Linux tells a process that its parent has ended")
def test_process_ends_with_a_parent_that_is_killed() -> None:
    code = """
import subprocess, sys, time
from partita.storage.processes import end_with_parent
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], preexec_fn=end_with_parent)
print(child.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        parent.kill()
    end = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < end, "the process was left behind"
        time.sleep(0.02)
