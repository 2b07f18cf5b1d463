"""Every command of the guide on data works as written, one after the other, in an empty folder."""

from __future__ import annotations

import re
import shlex
import warnings
from pathlib import Path

import pytest
from shell import Shell

GUIDE = Path(__file__).parent.parent.parent / "docs" / "guide" / "data.md"


def test_commands_of_the_data_guide_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = re.findall(r"^    partita (.+)$", GUIDE.read_text(), re.MULTILINE)
    assert len(commands) >= 8
    monkeypatch.chdir(tmp_path)
    run_partita = Shell(monkeypatch, capsys)
    for command in commands:
        jobs = ["--jobs", "1"] if command.startswith("compare") else []
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            code, _, err = run_partita(*shlex.split(command), *jobs)
        told = [line for line in err.splitlines() if not line.startswith("note: ")]
        assert (code, told) == (0, []), command
