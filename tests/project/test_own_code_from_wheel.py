"""A user's own code from an installed wheel: run, kill, resume, compare, report, audit and Flower."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from own_code_fixtures import CONFIG, MINE, write_own_code

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "scripts"))
import run_docs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment of a user who has installed the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    state = {"XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}
    return {**run_docs.install(folder), **state}


def test_own_method_data_metric_and_server_rule(tmp_path: Path, installed: Mapping[str, str]) -> None:
    lab = tmp_path / "lab"
    write_own_code(lab, CONFIG.replace("rounds = 3", "rounds = 12"))
    # Every round takes a moment, so that there is time to kill the run.
    (lab / "mine.py").write_text(
        MINE.replace(
            "def track(row: Any) -> None:\n", "def track(row: Any) -> None:\n        __import__('time').sleep(0.2)\n"
        )
    )

    def command(*words: object) -> list[str]:
        return [f"{installed['VIRTUAL_ENV']}/bin/partita", *map(str, words)]

    def run(*words: object) -> str:
        done = subprocess.run(command(*words), cwd=lab, env=installed, text=True, capture_output=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("run", "-c", "own.toml", "--out", "whole", "-q")
    killed = subprocess.Popen(command("run", "-c", "own.toml", "--out", "killed", "-q"), cwd=lab, env=installed)
    until = time.monotonic() + 300
    while not (lab / "killed" / "rows.jsonl").exists() or (lab / "killed" / "rows.jsonl").read_text().count("\n") < 3:
        assert time.monotonic() < until
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (lab / "killed" / "result.json").exists()
    mine = (lab / "mine.py").read_text()
    (lab / "mine.py").write_text("raise RuntimeError('the original is not read again')\n")
    run("resume", "killed", "-q")
    (lab / "mine.py").write_text(mine)
    ends = [json.loads((lab / name / "result.json").read_text()) for name in ("whole", "killed")]
    assert ends[0]["digest"] == ends[1]["digest"]
    assert ends[0]["test"] == ends[1]["test"]

    run("compare", "-c", "own.toml", "--methods", "fedavg,mine.py:half,fedprox+mine.py:half(share=0.9)", "--seeds", 2,
        "--rounds", 2, "--out", "compared", "--metric", "top2")  # fmt: skip
    compared = json.loads(run("report", "compared", "--json", "--metric", "wrong"))
    assert [line["label"] for line in compared["lines"]] == ["fedavg", "fedprox+half(share=0.9)", "half"]
    assert compared["higher_is_better"] is False
    assert "class PartOfTheWay" in (lab / "compared" / "report.html").read_text()

    findings = json.loads(run("audit", "killed", "--json"))
    assert findings["attacks"]

    run("flower", "init", "app", "--config", "own.toml", "--set", "rounds=2")
    run("flower", "up", "app", "--run", "--out", "over-flower")
    run("run", "-c", "own.toml", "--rounds", 2, "--out", "here", "-q")
    ends = [json.loads((lab / name / "result.json").read_text()) for name in ("over-flower", "here")]
    assert ends[0]["test"] == ends[1]["test"]
    assert (lab / "over-flower" / "code" / "mine.py").read_text() == mine
    logs = "".join(path.read_text() for path in (lab / "runs" / "flower").rglob("*.log"))
    assert "running own code mine.py, version " in logs
