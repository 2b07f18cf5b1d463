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

from study_fixtures import write_study

ROOT = Path(__file__).parents[2]
ABSENT = ("dp_accounting", "flwr", "matplotlib", "opacus", "optuna", "pandas", "peft")
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


def results(file: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the lines by arm and seed without what depends on the clock."""
    found = {}
    for line in lines(file):
        kept = {key: value for key, value in line.items() if key not in ("seconds", "round_seconds")}
        assert (line["arm"], line["seed"]) not in found, "a run was played twice"
        found[line["arm"], line["seed"]] = kept
    return found


def test_a_study_is_played_killed_and_resumed(tmp_path: Path) -> None:
    whole = play_whole(tmp_path / "whole", tmp_path / "absent")
    check_failures(whole)
    check_archive(whole)
    check_line(whole)
    file = play_killed(tmp_path / "killed")
    assert results(file) == results(whole / "small.jsonl")


def play_whole(folder: Path, absent: Path) -> Path:
    """Play the study without interruption, by two processes, without packages that a rented machine may lack."""
    write_study(folder)
    absent.mkdir()
    (absent / "sitecustomize.py").write_text(WITHOUT)
    with play(folder, "run", "small.toml", "--jobs", "2", "--archive", "out/all.tar.gz", without=absent) as process:
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 1, output
    return folder


def check_failures(folder: Path) -> None:
    """An arm that fails does not stop the others."""
    arms = ("fedavg", "fedprox 0.1")
    assert set(results(folder / "small.jsonl")) == {(arm, seed) for arm in arms for seed in range(3)}
    failed = lines(folder / "small.failed.jsonl")
    assert len(failed) == 6, "three runs, each tried twice"
    assert {line["arm"] for line in failed} == {"broken"}
    assert "patch" in failed[0]["error"]
    assert "Traceback" in failed[0]["trace"]
    assert not list((folder / "runs" / "studies").glob("*/checkpoints")), "folders of finished runs are deleted"


def check_archive(folder: Path) -> None:
    with tarfile.open(folder / "out" / "all.tar.gz") as archive:
        assert set(archive.getnames()) == {"small.jsonl", "small.failed.jsonl", "small.log"}
        stored = archive.extractfile("small.jsonl")
        assert stored is not None
        assert stored.read() == (folder / "small.jsonl").read_bytes()


def check_line(folder: Path) -> None:
    line = results(folder / "small.jsonl")["fedprox 0.1", 2]
    assert (line["study"], line["kind"], line["point"], line["chosen"]) == ("small", "run", {}, {})
    assert line["test"]["rounds"] == [1, 2, 3]
    assert len(line["test"]["accuracy"]) == len(line["test"]["loss"]) == len(line["bytes"]["up"]) == 3
    assert set(line["personal"]["clients"]["accuracy"]) == {"c0", "c1", "c2"}
    assert len(line["digest"]) == 16


def play_killed(folder: Path) -> Path:
    """Kill a call after its first line, leave a line that was cut off, and play the rest. Return the lines."""
    write_study(folder)
    file = folder / "small.jsonl"
    words = ("run", "small.toml", "--arms", "fedavg,fedprox 0.1")
    with play(folder, *words) as process:
        waited = time.monotonic()
        while not file.exists() or not file.read_text().count("\n"):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() - waited < 600
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    before = len(lines(file))
    assert 0 < before < 6
    with file.open("a") as stream:
        stream.write('{"study": "small", "ki')
    with play(folder, *words) as again:
        output, _ = again.communicate(timeout=600)
    assert again.returncode == 0, output
    assert output.count(" small run: ") == 6 - before, "finished runs are not played again"
    return file
