"""`studies/play.py` as a command: a tiny study played by two processes, killed and resumed, with an arm that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import play as cli
import pytest
from playing import work
from playing.choice import Asked, plan
from playing.study import read_study
from study_fixtures import write_study

from partita.storage import checkpoint

ROOT = Path(__file__).parents[2]
ABSENT = ("datasets", "dp_accounting", "flwr", "matplotlib", "opacus", "optuna", "pandas", "peft", "rich", "typer")
# Python imports this file at its start, also in spawned processes. The package counts as not installed.
WITHOUT = f"""
import importlib.metadata, sys

class Finder:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {ABSENT!r} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Finder, sys.meta_path)
found = importlib.metadata.version

def version(name):
    if name in {("partita", *ABSENT)!r}:
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)

importlib.metadata.version = version
"""


def play(folder: Path, *words: str, without: Path | None = None) -> subprocess.Popen[str]:
    path = [str(each) for each in (without, ROOT / "src") if each]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "studies" / "play.py"), *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def result(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line without what depends on the clock and the checkout."""
    return {key: value for key, value in line.items() if key not in ("commit", "round_seconds", "seconds")}


@pytest.mark.slow
def test_a_study_is_killed_and_resumed_while_one_arm_fails(tmp_path: Path) -> None:
    """Two processes play it without packages that a rented machine may lack. The lines are those of single runs."""
    folder, absent = tmp_path / "study", tmp_path / "absent"
    study = read_study(write_study(folder))
    absent.mkdir()
    (absent / "sitecustomize.py").write_text(WITHOUT)
    file, words = folder / "small.jsonl", ("run", "small.toml", "--jobs", "2", "--archive", "out/all.tar.gz")
    with play(folder, *words, without=absent) as process:
        waited = time.monotonic()
        while not file.exists() or not file.read_text().count("\n"):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() - waited < 600
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    before = file.read_text()
    assert 0 < before.count("\n") < 6
    with file.open("a") as stream:
        stream.write('{"study": "small", "ki')  # a line that was cut off
    with play(folder, *words, without=absent) as again:
        output, _ = again.communicate(timeout=600)

    assert again.returncode == 1, output
    assert file.read_text().startswith(before), "finished runs are not played again"
    found = {(line["arm"], line["seed"]): result(line) for line in lines(file)}
    assert len(found) == len(lines(file)) == 6
    good = plan(study, "run", Asked(arms=["fedavg", "fedprox 0.1"]), [])
    alone = {(run.arm, run.seed): result(work.play(run, tmp_path / "alone", 1, None)) for run in good}
    assert found == alone
    check_failures(folder)
    check_archive(folder)


@pytest.mark.slow
def test_a_study_is_played_again_into_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path)
    (tmp_path / "small.jsonl").write_text("as it is\n")
    words = ("run", "small.toml", "--arms", "fedavg", "--seeds", "0", "--lines", "out/again")
    with play(tmp_path, *words) as process:
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    [line] = lines(tmp_path / "out" / "again" / "small.jsonl")
    assert (line["arm"], line["seed"]) == ("fedavg", 0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["play.py", "table", "small.toml", "--lines", "out/again"])
    cli.main()
    assert "| `fedavg` |" in capsys.readouterr().out
    assert (tmp_path / "small.jsonl").read_text() == "as it is\n"
    assert not (tmp_path / "small.log").exists()


def check_failures(folder: Path) -> None:
    failed = lines(folder / "small.failed.jsonl")
    assert sorted((line["arm"], line["seed"]) for line in failed) == [("broken", seed) for seed in (0, 0, 1, 1, 2, 2)]
    assert "patch" in failed[0]["error"]
    assert "Traceback" in failed[0]["trace"]
    left = [path.name for path in (folder / "runs" / "studies").glob("*/result.json")]
    assert not left, "folders of finished runs are deleted"


def check_archive(folder: Path) -> None:
    with tarfile.open(folder / "out" / "all.tar.gz") as archive:
        assert set(archive.getnames()) == {"small.jsonl", "small.failed.jsonl", "small.log"}
        stored = archive.extractfile("small.jsonl")
        assert stored is not None
        assert stored.read() == (folder / "small.jsonl").read_bytes()


@pytest.mark.slow
def test_a_run_without_a_table_checkpoint_writes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuning would write one after each round that is the best so far. The line is the same with and without them."""
    with_table = read_study(write_study(tmp_path / "with"))
    config = (tmp_path / "with" / "tiny.toml").read_text().replace("[checkpoint]\nevery = 1\n", "")
    without = read_study(write_study(tmp_path / "without", config=config))
    [kept] = plan(with_table, "run", Asked(arms={"fedavg"}, seeds=[0]), [])
    [run] = plan(without, "run", Asked(arms={"fedavg"}, seeds=[0]), [])
    expected = work.play(kept, tmp_path / "work", 1, None)
    monkeypatch.setattr(checkpoint, "save", _never)
    found = work.play(run, tmp_path / "work", 1, None)
    assert result(found) == result(expected)


def _never(*args: object, **kwargs: object) -> None:
    raise AssertionError("a checkpoint was written")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("cores", "warned"), [(3, True), (4, False)])
def test_more_runs_than_cores_give_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cores: int,
    warned: bool,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.setattr("sys.argv", ["play.py", "run", str(write_study(tmp_path)), "--jobs", "4", "--dry-run"])
    assert cli.main() == 0
    assert (f"--jobs is 4, but there are {cores} cores" in capsys.readouterr().err) == warned
