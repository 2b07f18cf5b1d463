"""The README's example, table and links are correct."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from partita.experiment.config import load
from partita.experiment.preview import preview
from partita.experiment.run_names import default_folder
from partita.methods import INDEX

README = Path(__file__).parent.parent.parent / "README.md"


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_readme_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = next(block for block in code_blocks("python") if "import" in block)
    assert len([line for line in example.splitlines() if line.strip()]) <= 12, "a dozen lines"
    exec(compile(example, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"round {number}" for number in range(6)]
    last = re.search(r"accuracy ([\d.]+)%", lines[-1])
    assert last is not None
    assert float(last[1]) > 50, "ten classes: clearly above chance"


def test_readme_plan_table_is_what_the_command_prints() -> None:
    shown = preview(load(README.parent / "examples" / "digits.toml"), 12, "c3").to_text()
    assert shown in README.read_text()


def test_readme_commands_name_the_folder_of_the_run_before_them() -> None:
    lines = [shlex.split(line) for block in code_blocks("sh") for line in block.splitlines()]
    run = next(words for words in lines if words[:2] == ["partita", "run"])
    changes = [word for before, word in pairwise(run) if before == "--set"]
    settings = load(README.parent / run[run.index("--config") + 1], changes)
    folder = str(default_folder(settings.label, settings.seed))
    assert [words[2] for words in lines if words[1:2] == ["resume"]] == [folder]


def test_readme_links_existing_files() -> None:
    for target in re.findall(r"\]\(((?!https?:)[^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target


def test_readme_counts_the_methods() -> None:
    assert f"| {len(INDEX)}, from FedAvg" in README.read_text()
