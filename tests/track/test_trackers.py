"""The four trackers, read back by their libraries: offline, across kill -9 and resume, and after the end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from track_fixtures import Recorded, read_mlflow, read_tensorboard, read_trackio, read_wandb

from partita.experiment import run_folder
from partita.experiment.config import parse
from partita.experiment.runner import start
from partita.experiment.tracking import RowSender, describe_run, metrics_of
from partita.track import to_mlflow
from partita.track.scalars import Totals, scalars, tables

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own
ROUNDS, KILLED = 5, 2  # the process is killed in round 2, and the newest checkpoint covers rounds 0 and 1
CONFIG = f"""
rounds = {ROUNDS}
method.name = "fedavg"
split = {{ name = "dirichlet", clients = 4, alpha = 0.5 }}
model = {{ name = "vit", layers = 1, width = 8, heads = 2 }}
evaluate.personal_every = 2
federation.client_dropout = 0.3
checkpoint.every = 2
engine = {{ threads = 1, clients_per_block = 4 }}
track = {{ to = ["tensorboard", "wandb", "mlflow", "trackio", "die.py:die"], group = "kills" }}
"""
DIE = f"""
import os, signal


def die(config, folder):
    def track(row):
        if row["round"] == {KILLED} and not (folder / "killed").exists():
            (folder / "killed").write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
    return track
"""


@dataclass(frozen=True)
class Tracked:
    folder: Path
    rows: list[dict]  # type: ignore[type-arg]

    def at(self, name: str) -> Path:
        return self.folder / "track" / name


def partita(*words: object) -> int:
    """Run a command in a process of its own, because libraries keep threads and services; return how it ended."""
    done = subprocess.run([sys.executable, "-m", "partita", *map(str, words)], capture_output=True, text=True)
    if done.returncode > 0:
        print(done.stderr)
    assert "warning" not in done.stderr, done.stderr
    return done.returncode


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nobody is logged in, and everything that a library keeps elsewhere goes to a folder of its own."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            patch.delenv(name, raising=False)
        patch.setenv("HOME", str(home))
        patch.setenv("TRACKIO_DIR", str(home / "trackio"))
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        for name in ("CACHE", "CONFIG", "DATA"):
            patch.setenv(f"WANDB_{name}_DIR", str(home / "wandb"))
        yield home


@pytest.fixture(scope="module")
def tracked(offline: Path, tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    """A run that was killed in mid-run, resumed and finished."""
    lab = tmp_path_factory.mktemp("lab")
    (lab / "die.py").write_text(DIE)
    (lab / "run.toml").write_text(CONFIG)
    folder = lab / "run"
    assert partita("run", "--config", lab / "run.toml", "--out", folder) == -signal.SIGKILL
    assert run_folder.count_rows(folder) == KILLED + 1
    assert run_folder.saved_rounds(folder) == KILLED
    assert partita("resume", folder) == 0
    return Tracked(folder, list(run_folder.read_rows(folder)))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    """The rows of such a run, in this process and without trackers."""
    raw = tomllib.loads(CONFIG)
    folder = tmp_path_factory.mktemp("lab") / "run"
    rows = list(start(parse({**raw, "track": {"to": []}}), folder))
    return Tracked(folder, rows)


def expected(run: Tracked) -> Recorded:
    """All scalars of the recorded rows, each step once."""
    found: Recorded = {}
    totals = Totals()
    for row in run.rows:
        for name, value in {**scalars(row, metrics_of(run.folder)), **totals.add(row)}.items():
            found.setdefault(name, []).append((row["round"], value))
    return found


def in_float32(recorded: Recorded) -> Recorded:
    """As TensorBoard keeps them."""
    return {name: [(step, float(np.float32(value))) for step, value in pairs] for name, pairs in recorded.items()}


@pytest.mark.slow
def test_rows_have_what_the_trackers_show(tracked: Tracked) -> None:
    assert [row["round"] for row in tracked.rows] == list(range(ROUNDS))
    assert any(row["lost"] for row in tracked.rows)
    names = expected(tracked)
    assert {"test/accuracy", "personal/accuracy/worst_tenth", "bytes/up", "bytes/down_total", "clients/lost"} <= set(
        names
    )
    assert [step for step, _ in names["round"]] == list(range(ROUNDS))


@pytest.mark.slow
def test_tensorboard_has_every_round_once(tracked: Tracked) -> None:
    found, texts = read_tensorboard(tracked.at("tensorboard"))
    assert found == in_float32(expected(tracked))
    shown = [text for text in texts if text.startswith("clients/text_summary ")]
    assert [int(text.split()[1]) for text in shown] == [
        row["round"] for row in tracked.rows if "clients" in tables(row)
    ]
    assert len(list(tracked.at("tensorboard").iterdir())) == 2  # of the first start and of the second


@pytest.mark.slow
def test_wandb_has_every_round_once(tracked: Tracked) -> None:
    found, header, records = read_wandb(tracked.at("wandb"))
    assert found == expected(tracked)
    assert header["group"] == "kills"
    assert header["config"]["training.lr"] == 0.001
    kinds = {record.WhichOneof("record_type") for record in records}
    assert not kinds & {"output", "output_raw", "stats", "environment"}
    files = [file.name for file in tracked.at("wandb").rglob("*") if file.is_file()]
    assert sum(name.startswith("clients_") for name in files) == sum("clients" in tables(row) for row in tracked.rows)
    assert not {"wandb-metadata.json", "requirements.txt", "output.log"} & set(files)


@pytest.mark.slow
def test_mlflow_has_every_round_once(tracked: Tracked) -> None:
    found, run, client = read_mlflow(f"sqlite:///{tracked.at('mlflow') / 'mlflow.db'}")
    assert found == expected(tracked)
    assert run.info.status == "FINISHED"
    assert run.data.params["training.lr"] == "0.001"
    assert run.data.tags.keys() == {"partita.run", "partita.group", "mlflow.runName"}
    with_table = [row for row in tracked.rows if "clients" in tables(row)]
    names = [file.path for file in client.list_artifacts(run.info.run_id, "clients")]
    assert names == [f"clients/round-{row['round']:06d}.json" for row in with_table]
    written = json.loads((tracked.at("mlflow") / "artifacts" / run.info.run_id / "artifacts" / names[0]).read_text())
    [table] = [tables(with_table[0])["clients"]]
    assert [dict(zip(written["columns"], line, strict=True)) for line in written["data"]] == table


@pytest.mark.slow
def test_trackio_has_every_round_once(tracked: Tracked) -> None:
    found, run, logs = read_trackio()
    assert found == expected(tracked)
    assert run.config["training.lr"] == 0.001
    assert run.config["_Username"] is None
    for log, row in zip(logs, tracked.rows, strict=True):
        shown = {name: value["_value"] for name, value in log.items() if isinstance(value, dict)}
        assert shown == tables(row)


@pytest.mark.slow
def test_nothing_of_this_machine_is_sent(tracked: Tracked, offline: Path) -> None:
    _, header, _ = read_wandb(tracked.at("wandb"))
    _, run, _ = read_mlflow(f"sqlite:///{tracked.at('mlflow') / 'mlflow.db'}")
    _, local, _ = read_trackio()
    config = tomllib.loads((tracked.folder / "config.toml").read_text())
    for sent in (header["config"], run.data.params, local.config):
        own = {key: value for key, value in sent.items() if not key.startswith("_")}
        for key, value in own.items():
            table, _, name = key.rpartition(".")
            known = (config[table] if table else config)[name]
            assert str(value) in (str(known), json.dumps(known)), key
        assert str(tracked.folder.parent) not in json.dumps(sent)
    assert not list(Path(offline).glob(".config/mlflow"))


def test_failed_tracker_gets_the_missed_rows_later(recorded: Tracked, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    class Fails:
        first = 1

        def log(self, round: int, *_: object) -> None:
            if round == 3 and sent[-1] != -3:
                sent.append(-3)
                raise OSError("no network")
            sent.append(round)

        def close(self, finished: bool) -> None:
            assert finished
            raise OSError("no network at the end")

    monkeypatch.setattr("partita.experiment.tracking.find_function", lambda *_: lambda run: Fails())
    config = tomllib.loads((recorded.folder / "config.toml").read_text())
    sender = RowSender("tensorboard", config, recorded.folder, recorded.rows)
    with pytest.warns(UserWarning, match=r"the tracker 'tensorboard' failed: OSError: no network; rows that it misses"):
        sender.send(ROUNDS)
    with pytest.warns(UserWarning, match="no network at the end"):
        sender.close()
    assert sent == [1, 2, -3, 3, 4]


@pytest.mark.slow
def test_two_starts_have_one_id_and_other_runs_another(tracked: Tracked) -> None:
    _, header, _ = read_wandb(tracked.at("wandb"))
    _, run, _ = read_mlflow(f"sqlite:///{tracked.at('mlflow') / 'mlflow.db'}")
    assert run.data.tags["partita.run"] == header["id"]
    assert read_trackio()[1].name.endswith(header["id"][:8])


@pytest.mark.slow
def test_database_that_another_process_creates_is_opened_again(
    tracked: Tracked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, real = [OSError("table experiments already exists")], to_mlflow._experiment

    def experiment(*words: Any) -> Any:
        if busy:
            raise busy.pop()
        return real(*words)

    monkeypatch.setattr(to_mlflow, "_experiment", experiment)
    monkeypatch.setattr(to_mlflow.time, "sleep", lambda seconds: None)
    config = tomllib.loads((tracked.folder / "config.toml").read_text())
    opened = to_mlflow.open_run(describe_run("mlflow", config, tracked.folder))
    assert opened.first == ROUNDS
