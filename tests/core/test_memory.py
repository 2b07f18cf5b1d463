"""How much memory is free: of the machine and of its container, whichever is less."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from partita.core import memory
from partita.core.memory import SizeError


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0.0 MB"),
        (10**9 - 10**6, "999.0 MB"),
        (10**9, "1.0 GB"),
        (1_500 * 10**9, "1.5 TB"),
        (10**12, "1.0 TB"),
        (10**15, "1.0 PB"),
        (10**18, "1.0 EB"),
        (12_345 * 10**18, "12,345.0 EB"),
    ],
)
def test_bytes_have_a_unit_that_suits_them(count: int, said: str) -> None:
    assert memory.size(count) == said


def test_what_is_free_is_the_smaller_of_two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_CONTAINER", tmp_path)
    free = memory._of_machine()
    assert 0 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory._of_container() >= 2**63, "there is no limit"
    assert abs(memory.available() - free) < free / 2
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert memory._of_container() == memory.available() == 3000
    memory.require(3000, "it", "make it smaller")
    with pytest.raises(SizeError, match=r"it would take 0\.0 MB, but only 0\.0 MB of memory are free; make it smaller"):
        memory.require(3001, "it", "make it smaller")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._of_container() >= 2**63


def test_the_machine_is_asked_for_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "MemTotal:       2000 kB\nMemFree:         500 kB\nMemAvailable:   1500 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda path: lines)
    assert memory._of_machine() == 1500 * 1024
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert memory._of_machine() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
