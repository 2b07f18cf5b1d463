"""Run partita commands in this process and capture their output."""

from __future__ import annotations

import sys

import pytest

from partita.cli import main


class Shell:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *words: object) -> tuple[int, str, str]:
        """Return (exit code, standard output, standard error)."""
        self.monkeypatch.setattr(sys, "argv", ["partita", *map(str, words)])
        try:
            main.main()
            code = 0
        except SystemExit as left:
            code = int(left.code or 0)
        shown = self.capsys.readouterr()
        return code, shown.out, shown.err
