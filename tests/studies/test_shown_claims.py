"""The page of verdicts has a command for each claim that held, and the commands can be played."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import play
import pytest

from partita.experiment.compare import expand
from partita.experiment.run_names import split_methods

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "studies" / "README.md").read_text()
SHOWN = [
    line for line in PAGE.partition("## See what held\n")[2].partition("\n## ")[0].splitlines() if line[:3] == "| `"
]
COMMANDS = [shlex.split(line.split(" | ")[1].strip("` ")) for line in SHOWN]


def test_each_claim_that_held_has_a_command() -> None:
    held = re.findall(r"^\| `([\w-]+)` \|.*\| held \|", PAGE, re.MULTILINE)
    shown = [claim for line in SHOWN for claim in re.findall(r"`([\w-]+)`", line.split(" | ")[0])]
    assert sorted(shown) == sorted(held)
    assert len(held) > 10


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "words", [words for words in COMMANDS if "studies/play.py" in words], ids=lambda words: words[3]
)
def test_the_runs_can_be_planned(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words[-2:] == ["--lines", "again"]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", [*words[1:-1], str(tmp_path / "again"), "--dry-run"])
    assert play.main() == 0
    assert re.search(r": ([1-9]\d*) runs to play, 0 done", capsys.readouterr().out)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("words", [words for words in COMMANDS if words[1] == "compare"], ids=lambda words: words[-1])
def test_the_methods_can_be_compared(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    options = list(pairwise(words))
    [methods] = [value for option, value in options if option == "--methods"]
    [config] = [Path(value) for option, value in options if option == "--config"]
    changes = [value for option, value in options if option == "--set"]
    assert len(expand(config, changes, methods, 5, tmp_path)) == 5 * len(split_methods(methods))


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] == "python"], ids=lambda words: words[1])
def test_the_scripts_exist(words: list[str]) -> None:
    assert (ROOT / words[1]).exists()
