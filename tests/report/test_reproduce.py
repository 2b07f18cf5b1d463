"""The commands on a report's page repeat its runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from html import unescape
from pathlib import Path

import pytest
from helpers import SMALL_TASK, SMALL_VIT
from report_fixtures import write_run
from shell import Shell

from partita.experiment.compare import expand
from partita.experiment.runner import start
from partita.report import load_run, page
from partita.report.reproduce import commands


def shell_block(text: str) -> str:
    """The commands as a browser copies them."""
    [block] = re.findall(r">Reproduce</h2>.*?<pre[^>]*>(.*?)</pre>", text, re.DOTALL)
    return unescape(block)


def digests(root: Path) -> dict[str, str]:
    return {
        str(path.parent.relative_to(root)): json.loads(path.read_text())["digest"]
        for path in sorted(root.rglob("result.json"))
    }


@pytest.mark.slow
def test_commands_on_the_page_repeat_all_runs(
    tmp_path: Path, run_partita: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "small.toml"
    config.write_text("rounds = 1\n[method]\nname = 'fedavg'" + SMALL_TASK + SMALL_VIT)
    planned = expand(config, (), "fedavg,fedprox(mu=0.1),fedper", 2, tmp_path / "runs")
    for folder, settings in planned:
        list(start(settings, folder))
    text = page([load_run(folder) for folder, _ in planned], tmp_path / "elsewhere" / "page.html").read_text()
    empty = tmp_path / "empty"
    empty.mkdir()
    script = shell_block(text).replace("partita run", "echo partita run")
    lines = subprocess.run(["sh", "-e", "-c", script], cwd=empty, check=True, capture_output=True, text=True).stdout
    assert len(lines.splitlines()) == 6
    monkeypatch.chdir(empty)
    for line in lines.splitlines():
        assert run_partita(*shlex.split(line)[1:])[0] == 0
    assert digests(empty / "again") == digests(tmp_path / "runs")
    assert len(digests(empty / "again")) == 6


def test_config_cannot_add_a_command(tmp_path: Path) -> None:
    """A run folder may come from a stranger. Nothing in its config may be run by who repeats it."""
    folder = write_run(tmp_path / "runs", "a", 0, rounds=2)
    path = folder / "config.toml"
    evil = '\n[evil]\ntext = """\nEND\ntouch pwned\n$(touch pwned)`touch pwned`\nEND_\ntouch pwned\n"""\n'
    path.write_text(path.read_text().replace('label = "a"', "label = \"a'; touch pwned; '\"") + evil)
    script = shell_block(page([load_run(folder)], tmp_path / "page.html").read_text())
    subprocess.run(["sh", "-e", "-c", f"partita() {{ :; }}\n{script}"], cwd=tmp_path, check=True)
    assert not (tmp_path / "pwned").exists()
    [written] = (tmp_path / "again").glob("*.toml")
    assert written.read_text().strip() == path.read_text().strip()


def test_runs_that_differ_in_more_than_the_seed_have_their_own_configs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, "a", seed, rounds=2) for seed in range(3)]
    other = runs[2] / "config.toml"
    other.write_text(other.read_text().replace("lr = 0.001", "lr = 0.5"))
    text = commands([load_run(folder) for folder in runs])
    ran = re.findall(r"^partita run .*", text, re.MULTILINE)
    assert ran == [
        "partita run --config again/a.toml --set seed=0 --out again/a/seed-0",
        "partita run --config again/a.toml --set seed=1 --out again/a/seed-1",
        "partita run --config again/a-2.toml --set seed=2 --out again/a/seed-2",
    ]
    assert text.count("lr = 0.5") == text.count("lr = 0.001") == 1


@pytest.mark.parametrize("labels", [("a b", "a_b"), ("x(1)", "x_1")])
def test_labels_with_the_same_folder_name_do_not_collide(labels: tuple[str, str], tmp_path: Path) -> None:
    records = [load_run(write_run(tmp_path / str(place), label, 0, rounds=2)) for place, label in enumerate(labels)]
    ran = re.findall(r"--config (\S+) .*--out (\S+)", commands(records))
    assert len(set(ran)) == len({out for _, out in ran}) == 2
