"""The command line through `main` in this process: output, errors and exit codes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import SMALL_VIT
from shell import Shell

from partita.experiment import pace, process_pool, run_folder
from partita.experiment.compare import expand
from partita.methods import INDEX
from partita.record import file_names
from partita.storage import atomic_files
from partita.storage.atomic_files import list_checksummed

CONFIG = (
    """
rounds = 4
[method]
name = "fedfrozen"
warmup = 2
[data]
name = "synthetic"
examples = 160
test_examples = 40
size = 4
[split]
name = "iid"
clients = 5
[evaluate]
personal_every = 2
"""
    + SMALL_VIT
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.toml"
    path.write_text(CONFIG)
    return path


def test_run_command_writes_records_and_a_report(run_partita: Shell, config: Path, tmp_path: Path) -> None:
    code, out, err = run_partita("run", "-c", config, "--out", tmp_path / "run", "--report")
    assert code == 0
    assert "fedfrozen(warmup=2)" in out
    other = [line for line in err.splitlines() if "one predicted class" not in line]  # so small a model may raise it
    assert [line.partition(",")[0] for line in other] == [
        f"fedfrozen(warmup=2): round {number}/4" for number in range(1, 5)
    ]
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {
        "config.toml", "environment.json", "rows.jsonl", "plan.json", "result.json", "report.html", "checkpoints",
    }  # fmt: skip
    told = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (told["block"], told["steps"]) == ("5", "taken plainly"), "the values that auto chose"
    rows = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 1, 2, 3]
    assert all(0 <= row["test"]["accuracy"] <= 1 for row in rows)
    assert [row["personal"] is not None for row in rows] == [False, True, False, True]
    assert len(rows[-1]["personal"]["accuracy"]) == 5
    assert {"query", "key", "value", "layer.0"} <= rows[1]["drift"].keys()
    assert not {"query", "key"} & rows[2]["drift"].keys(), "frozen parameters have no drift"
    stages = json.loads((tmp_path / "run" / "plan.json").read_text())["stages"]
    assert [(stage["first"], stage["last"]) for stage in stages] == [(0, 1), (2, 3)]
    code, out, _ = run_partita("ls", tmp_path, "--json")
    assert code == 0
    assert [(row["label"], row["finished"]) for row in json.loads(out)] == [("fedfrozen(warmup=2)", True)]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedfrozen", "local-only", "centralized"])
def test_plan_command_predicts_the_bytes_of_a_run(
    method: str, run_partita: Shell, config: Path, tmp_path: Path
) -> None:
    changes = ["--set", f"method={{name='{method}'" + (", warmup=2}" if method == "fedfrozen" else "}")]
    changes += ["--set", "federation.cohort=2", "--set", "federation.client_dropout=0.2"]
    assert run_partita("run", "-c", config, "--out", tmp_path / "run", *changes)[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    for row in rows:
        up = down = 0
        for client in row["cohort"]:
            code, out, _ = run_partita(
                "plan", "-c", config, *changes, "--round", row["round"], "--client", client, "--json"
            )
            assert code == 0
            shown = json.loads(out)
            assert shown["asked"]
            down += shown["bytes_down"]
            up += 0 if client in row["lost"] else shown["bytes_up"]
        assert {"up": up, "down": down} == row["bytes"]


@pytest.mark.slow
def test_plan_command_groups_by_role_layer_or_name(run_partita: Shell, config: Path) -> None:
    for by, expected in (("role", "query"), ("layer", "layer.0"), ("name", "vit.layers.0.attention.q_proj.weight")):
        code, out, _ = run_partita("plan", "-c", config, "--round", 3, "--by", by)
        assert code == 0
        assert expected in out
    code, out, _ = run_partita("plan", "-c", config, "--round", 3, "--json")
    groups = {group["name"]: group for group in json.loads(out)["groups"]}
    assert groups["query"]["trains"] == groups["query"]["up"] == 0 < groups["value"]["up"]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("times", "told"), [(90.0, "about 90 times slower than float32"), (1.9, None)])
def test_slow_bfloat16_on_a_cpu_gives_a_one_line_warning(
    times: float, told: str | None, run_partita: Shell, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "bf16_slowdown", lambda: times)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        words = (
            "run",
            "-c",
            config,
            "--set",
            "training.precision=bfloat16",
            "--set",
            "rounds=1",
            "--set",
            "engine.device=cpu",
        )
        code, _, err = run_partita(*words, "--out", tmp_path / "run", "--quiet")
        assert code == 0
        assert err.count("\n") == (1 if told else 0)
        assert (told or "") in err
        assert err.startswith("warning: bfloat16" if told else "")
        warnings.warn_explicit("of others", DeprecationWarning, "elsewhere.py", 7)
    assert "elsewhere.py:7: DeprecationWarning: of others" in run_partita("methods")[2]


def test_float32_run_does_not_measure_bfloat16(
    run_partita: Shell, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "bf16_slowdown", lambda: pytest.fail("nobody asked"))
    assert run_partita("run", "-c", config, "--set", "rounds=1", "--out", tmp_path / "run")[0] == 0


def test_resume_command_continues_a_run_and_run_refuses_to_restart_it(
    run_partita: Shell, config: Path, tmp_path: Path
) -> None:
    whole, half = tmp_path / "whole", tmp_path / "half"
    run_partita("run", "-c", config, "--out", whole)
    run_partita("run", "-c", config, "--out", half)
    # As if it had been killed after the first round.
    (half / "result.json").unlink()
    for path in list_checksummed(half / "checkpoints"):
        path.unlink()
    code, _, err = run_partita("run", "-c", config, "--out", half)
    assert code == 1
    assert "already holds an unfinished run with 0 of 4 rounds saved; continue it with --resume" in err
    assert run_partita("resume", half)[0] == 0
    digests = [json.loads((folder / "result.json").read_text())["digest"] for folder in (whole, half)]
    assert digests[0] == digests[1]
    code, out, _ = run_partita("resume", half)
    assert code == 0
    assert "finished" in out
    code, _, err = run_partita("resume", tmp_path / "nowhere")
    assert code == 1
    assert "holds no run" in err


def test_compare_command_prints_the_scores_of_each_method(
    run_partita: Shell, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A thread instead of processes, which would import torch again.
    monkeypatch.setattr(process_pool, "ProcessPoolExecutor", lambda jobs, *_: ThreadPoolExecutor(jobs))
    words = ["compare", "-c", config, "--methods", "fedavg, centralized", "--seeds", 1, "--out", tmp_path / "out"]
    code, out, _ = run_partita(*words, "--set", "rounds=1", "--jobs", 1, "--json")
    assert code == 0
    lines = json.loads(out)["lines"]
    assert [line["label"] for line in lines] == ["fedavg", "centralized"]
    rows = [json.loads((tmp_path / "out" / line["label"] / "seed-0" / "rows.jsonl").read_text()) for line in lines]
    assert [line["final"] for line in lines] == [row["test"]["accuracy"] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_compare_command_covers_methods_and_seeds(
    jobs: int, run_partita: Shell, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if jobs == 1:
        monkeypatch.setattr(process_pool, "ProcessPoolExecutor", lambda jobs, *_: ThreadPoolExecutor(jobs))
    words = ["compare", "-c", config, "--methods", "fedavg, fedprox(mu=0.5)", "--seeds", 2, "--out", tmp_path / "out"]
    code, out, _ = run_partita(*words, "--set", "rounds=2", "--jobs", jobs, "--json")
    assert code == 0
    lines = json.loads(out)["lines"]
    assert [line["label"] for line in lines] == ["fedavg", "fedprox(mu=0.5)"]
    assert [line["seeds"] for line in lines] == [[0, 1], [0, 1]]
    # The second call reuses the finished runs and prints the same.
    assert run_partita(*words, "--set", "rounds=2", "--jobs", 1, "--json")[:2] == (0, out)
    code, _, err = run_partita(*words, "--set", "rounds=3", "--jobs", 1)
    assert code == 1
    assert "holds another run: rounds is 2 there and 3 here; replace it with --overwrite" in err
    # A report compares with fedavg, or with the label of --against.
    told = ["report", tmp_path / "out", "--json"]
    for words, first in (([], "fedavg"), (["--against", "fedprox(mu=0.5)"], "fedprox(mu=0.5)")):
        assert json.loads(run_partita(*told, *words)[1])["lines"][0]["label"] == first
    assert "did you mean 'fedavg'?" in run_partita(*told, "--against", "fedavgg")[2]
    assert "loss: value of the last tested round" in run_partita(*told, "--metric", "loss")[1]
    assert (
        "--metric is 'los', which no run has recorded; did you mean 'loss'?" in run_partita(*told, "--metric", "los")[2]
    )


def _children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them")
def test_killed_comparison_leaves_no_process(config: Path, tmp_path: Path) -> None:
    words = ["compare", "-c", str(config), "--methods", "fedavg", "--seeds", "2", "--jobs", "2", "--out"]
    words += [str(tmp_path / "out"), "--set", "rounds=500"]
    with subprocess.Popen([sys.executable, "-m", "partita", *words], stderr=subprocess.DEVNULL) as parent:
        while not list((tmp_path / "out").glob("*/seed-1/rows.jsonl")):
            time.sleep(0.1)
        children = _children(parent.pid)
        parent.kill()
    assert len(children) >= 2
    until = time.monotonic() + 5
    while any(map(_is_running, children)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(_is_running, children))


def test_methods_command_lists_methods_and_prints_cards(run_partita: Shell) -> None:
    code, out, _ = run_partita("methods", "--json")
    assert code == 0
    assert [row["name"] for row in json.loads(out)] == list(INDEX)
    assert "fedfrozen+scaffold" in json.loads(out)[list(INDEX).index("scaffold")]["compositions"]
    assert "FedProx" in run_partita("methods")[1]
    assert run_partita("methods", "fedprox")[1].startswith("# fedprox")
    code, _, err = run_partita("methods", "fedpro")
    assert code == 1
    assert "did you mean 'fedprox'?" in err


def test_compare_method_options_can_be_lists_and_other_tables(config: Path, tmp_path: Path) -> None:
    specs = "fedavg, layer-skipping(layers=[0], embeddings=true, training.lr=0.5),fedprox(mu=2)"
    runs = [settings for _, settings in expand(config, ["rounds=2"], specs, 1, tmp_path)]
    assert [each.method for each in runs] == [
        {"name": "fedavg", "finetune": 0},
        {"name": "layer-skipping", "layers": (0,), "embeddings": True},
        {"name": "fedprox", "mu": 2},
    ]
    assert [each.training.lr for each in runs] == [1e-3, 0.5, 1e-3]


BAD_INPUT = {
    "a mistyped key": (["training.btach_size=3"], "unknown key 'training.btach_size'; did you mean 'batch_size'?"),
    "a wrong type": (["training.lr=fast"], "training.lr is 'fast'; it must be a number"),
    "an unknown method": (["method={name='fedavgg'}"], "unknown method 'fedavgg'; did you mean 'fedavg'?"),
    "a tag that matches nothing": (["model.frozen=['qurey']"], "no parameter of vit is named or tagged 'qurey'"),
    "a frozen kernel that a method asks for": (
        ["model.frozen=['query']"],
        "tagged 'query' are frozen for the whole run",
    ),
    "more clients than samples": (["split.clients=500"], "500 clients"),
    "an empty client": (
        ["split={name='quantity', clients=50, alpha=0.01, min_examples=1}"],
        "got 0; use fewer clients",
    ),
    "too large a cohort": (["federation.cohort=9"], "federation.cohort is 9, but there are 5 clients"),
    "a learning rate that blows up": (
        ["training.lr=1e9", "training.optimizer=sgd", "method={name='fedavg'}"],
        "lower training.lr, set training.clip, or check the client's data",
    ),
    "a trace that is not there": (["federation.availability_trace=none.csv"], "cannot read the trace none.csv"),
    "no answers": (["federation.client_dropout=1.0"], "0 of 5 clients answered in round 0"),
}


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_gives_one_clear_message(what: str, run_partita: Shell, config: Path, tmp_path: Path) -> None:
    changes, message = BAD_INPUT[what]
    code, _, err = run_partita(
        "run", "-c", config, "--out", tmp_path / "run", *(word for change in changes for word in ("--set", change))
    )
    assert code == 1
    assert message in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err


@pytest.mark.slow
def test_clients_too_small_for_a_test_part_still_train(run_partita: Shell, config: Path, tmp_path: Path) -> None:
    changes = ["--set", "split.clients=160", "--set", "rounds=1"]
    assert run_partita("run", "-c", config, "--out", tmp_path / "run", *changes)[0] == 0
    row = json.loads((tmp_path / "run" / "rows.jsonl").read_text().splitlines()[-1])
    assert row["personal"] == {}, "one example each, used for training"


@pytest.mark.slow
def test_resume_command_names_a_damaged_checkpoint_and_loses_nothing(
    run_partita: Shell, config: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run_partita("run", "-c", config, "--out", folder)
    before = json.loads((folder / "result.json").read_text())
    (folder / "result.json").unlink()
    newest = list_checksummed(folder / "checkpoints")[-1]
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    rows = (folder / "rows.jsonl").read_bytes()
    code, _, err = run_partita("resume", folder)
    assert code == 1
    assert f"{newest} is damaged" in err
    assert "delete it to resume from the checkpoint before it" in err
    assert (folder / "rows.jsonl").read_bytes() == rows
    newest.unlink()
    assert run_partita("resume", folder)[0] == 0
    assert json.loads((folder / "result.json").read_text())["digest"] == before["digest"]


@pytest.mark.slow
def test_full_disk_during_a_run_command_loses_nothing(
    run_partita: Shell, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    run_partita("run", "-c", config, "--out", whole)
    real, calls = os.replace, []

    def full(one: Path, other: Path) -> None:
        if Path(other).parent.name == "checkpoints":
            calls.append(other)
            if len(calls) == 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(one, other)

    monkeypatch.setattr(atomic_files.os, "replace", full)
    code, _, err = run_partita("run", "-c", config, "--out", folder)
    assert code == 1
    assert "No space left on device" in err
    assert f"partita resume {folder}" in err
    assert "Traceback" not in err
    assert len(list_checksummed(folder / "checkpoints")) == 2
    assert not list(folder.rglob("*.part"))
    assert run_partita("resume", folder)[0] == 0
    digests = [json.loads((path / file_names.RESULT).read_text())["digest"] for path in (whole, folder)]
    assert digests[0] == digests[1]


def test_two_processes_cannot_share_a_run(run_partita: Shell, config: Path, tmp_path: Path) -> None:
    with run_folder.lock(tmp_path / "run"):
        code, _, err = run_partita("run", "-c", config, "--out", tmp_path / "run")
    assert code == 1
    assert "in use by another process" in err
