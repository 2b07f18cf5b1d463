"""What `run`, `resume`, `compare` and `ls` print and refuse, as a user sees it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import SMALL_VIT
from report_fixtures import write_run
from rich.console import Console
from shell import Shell

from partita.cli import main, progress
from partita.cli.progress import Display, Verbosity, duration
from partita.experiment import compare, process_pool, run_folder, runner
from partita.experiment.compare import Status, expand
from partita.methods import INDEX
from partita.record import file_names

CONFIG = (
    """
rounds = 3
[method]
name = "fedavg"
[data]
name = "synthetic"
examples = 60
test_examples = 20
size = 4
[split]
name = "iid"
clients = 3
[evaluate]
every = 2
personal_every = 0
"""
    + SMALL_VIT
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.toml"
    path.write_text(CONFIG)
    return path


# ---- output


@pytest.mark.slow
def test_log_has_a_line_for_each_tested_round(run_partita: Shell, config: Path, tmp_path: Path) -> None:
    code, out, err = run_partita("run", "-c", config, "--out", tmp_path / "run", "--rounds", 4)
    assert code == 0
    first, second = err.splitlines()
    assert re.fullmatch(r"fedavg: round 2/4, accuracy [\d.]+%, [\d.e-]+ s per round, \d+ s left", first)
    assert re.fullmatch(r"fedavg: round 4/4, accuracy [\d.]+%, [\d.e-]+ s per round", second)
    assert "fedavg" in out


@pytest.mark.slow
def test_quiet_prints_only_the_table_and_warnings(run_partita: Shell, config: Path, tmp_path: Path) -> None:
    code, out, err = run_partita("run", "-c", config, "--out", tmp_path / "run", "-q")
    assert (code, err) == (0, "")
    assert "accuracy" in out
    changes = ["--set", "federation.client_dropout=0.5", "--set", "federation.min_updates=0"]
    _, _, err = run_partita("run", "-c", config, "--out", tmp_path / "lost", "-q", *changes)
    assert err
    assert all(re.match(r"round \d/3: lost c\d: dropped out", line) for line in err.splitlines())


@pytest.mark.slow
def test_verbose_prints_every_round_and_how_it_is_computed(run_partita: Shell, config: Path, tmp_path: Path) -> None:
    _, _, err = run_partita("run", "-c", config, "--out", tmp_path / "run", "-v")
    about, *lines = err.splitlines()
    assert re.match(r"on cpu, \d+ threads, blocks of 3", about)
    assert [line.split(",")[0] for line in lines] == [f"fedavg: round {number}/3" for number in (1, 2, 3)]
    assert all(
        re.search(r"training loss .* MB up, .* MB down, drift .* \(\S+\) to .* s per round", line) for line in lines
    )
    code, _, err = run_partita("run", "-c", config, "-v", "-q")
    assert (code, err) == (1, "error: --quiet and --verbose exclude each other; choose one\n")


def test_private_run_prints_epsilon(run_partita: Shell, config: Path, tmp_path: Path) -> None:
    changes = ["--set", "privacy.noise=2.0", "--set", "privacy.repeatable=true", "--set", "privacy.accountant=rdp"]
    _, _, err = run_partita("run", "-c", config, "--out", tmp_path / "run", *changes, "--rounds", 2)
    assert re.search(r"round 2/2, accuracy [\d.]+%, ε [\d.]+, ", err)


@pytest.mark.slow
def test_log_has_a_line_at_least_every_minute(
    run_partita: Shell, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "HEARTBEAT", 0.0)
    _, _, err = run_partita("run", "-c", config, "--out", tmp_path / "run", "--set", "evaluate.every=9")
    assert [line.split(",")[0] for line in err.splitlines()] == [f"fedavg: round {number}/3" for number in (1, 2, 3)]


def test_terminal_shows_progress_within_a_round(
    run_partita: Shell, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    told: list[tuple[float, str]] = []
    real = Display.update

    def update(self: Display, done: float, description: str | None = None, clients: str = "") -> None:
        told.append((done, clients))
        real(self, done, description, clients)

    monkeypatch.setattr(Display, "update", update)
    words = ["run", "-c", config, "--out", tmp_path / "run", "--rounds", 1, "--set", "engine.clients_per_block=1"]
    code, _, err = run_partita(*words)
    assert code == 0
    assert "rounds" in err
    thirds = [pytest.approx(count / 3) for count in range(4)]
    assert told == [*((done, f", {count}/3 clients") for count, done in enumerate(thirds)), (1, "")]


@pytest.mark.parametrize(
    ("terminal", "notebook", "widgets", "verbosity", "has_bar"),
    [
        (True, False, False, Verbosity.NORMAL, True),
        (False, False, True, Verbosity.NORMAL, False),
        (False, True, True, Verbosity.NORMAL, True),
        (False, True, True, Verbosity.QUIET, False),
        (False, True, False, Verbosity.NORMAL, False),  # rich would show nothing but a warning
    ],
)
def test_a_terminal_and_a_notebook_have_a_bar(
    terminal: bool, notebook: bool, widgets: bool, verbosity: Verbosity, has_bar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        progress, "Console", lambda stderr: Console(stderr=stderr, force_terminal=terminal, force_jupyter=notebook)
    )
    monkeypatch.setattr(progress, "find_spec", lambda name: object() if widgets and name == "ipywidgets" else None)
    shown = Display(verbosity, "fedavg", 2)
    assert (shown.has_bar, shown.bar.disable) == (has_bar, not has_bar)


def test_durations_are_short() -> None:
    assert [duration(value) for value in (0.4, 89, 91, 5400, 7260)] == [
        "0 s",
        "89 s",
        "2 min",
        "1 h 30 min",
        "2 h 1 min",
    ]


def test_comparison_log_tells_finished_runs_and_rounds(
    run_partita: Shell, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = expand(config, [], "fedavg", 2, tmp_path / "out")
    for folder, settings in planned:
        list(runner.start(settings, folder))
    statuses = [Status(0), Status(4, (planned[0],)), Status(6, (planned[1],))]
    monkeypatch.setattr(progress, "HEARTBEAT", 0.0)
    progress.follow_all(iter(statuses), planned, Verbosity.NORMAL)
    lines = run_partita.capsys.readouterr().err.splitlines()
    assert lines[0] == "0 of 6 rounds, 0 of 2 runs finished"
    assert re.fullmatch(r"fedavg: seed 0, finished, accuracy [\d.]+% \(1 of 2 runs\)", lines[1])
    assert re.fullmatch(r"4 of 6 rounds, 1 of 2 runs finished, .* s per round, 0 s left", lines[2])
    progress.follow_all(iter(statuses), planned, Verbosity.QUIET)
    assert run_partita.capsys.readouterr().err == ""


# ---- resuming and overwriting


@pytest.mark.slow
def test_run_resumes_or_overwrites_on_request(run_partita: Shell, config: Path, tmp_path: Path) -> None:
    words = ["run", "-c", config, "--out", tmp_path / "run"]
    assert run_partita(*words, "--resume")[0] == 0
    first = (tmp_path / "run" / "environment.json").read_bytes()
    code, _, err = run_partita(*words)
    assert code == 1
    assert err == (
        f"error: {tmp_path / 'run'} already holds a finished run; replace it with --overwrite, or choose another "
        "folder with --out\n"
    )
    code, out, err = run_partita(*words, "--resume")
    assert (code, err) == (0, "")
    assert "is finished; nothing to resume" in out
    code, _, err = run_partita(*words, "--resume", "--set", "training.lr=0.5")
    assert code == 1
    assert "holds another run: training.lr is " in err
    assert len(err.splitlines()) == 1
    assert run_partita(*words, "--resume", "--rounds", 4)[0] == 0
    assert run_folder.count_rows(tmp_path / "run") == 4
    code, _, err = run_partita(*words, "--resume")
    assert (code, "not cut to 3" in err) == (1, True)
    assert run_partita(*words, "--overwrite", "--rounds", 2)[0] == 0
    assert run_folder.count_rows(tmp_path / "run") == 2
    assert (tmp_path / "run" / "environment.json").read_bytes() != first
    code, _, err = run_partita(*words, "--overwrite", "--resume")
    assert (code, err) == (1, "error: --resume continues a run and --overwrite deletes it; choose one\n")


@pytest.mark.slow
def test_compare_overwrites_on_request(
    run_partita: Shell, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    [(folder, settings)] = expand(config, [], "fedavg", 1, out)
    list(runner.start(settings, folder))
    with pytest.raises(run_folder.RunFolderError, match="rounds is 3 there and 2 here"):
        expand(config, ["rounds=2"], "fedavg", 1, out)
    # Threads instead of processes, which would import torch again.
    monkeypatch.setattr(process_pool, "ProcessPoolExecutor", lambda jobs, *_: ThreadPoolExecutor(jobs))
    words = ["compare", "-c", config, "--methods", "fedavg", "--seeds", 1, "--out", out, "--rounds", 2, "--overwrite"]
    code, _, err = run_partita(*words)
    assert code == 0
    assert re.fullmatch(r"fedavg: seed 0, finished, accuracy [\d.]+% \(1 of 1 runs\)\n", err)
    assert run_folder.count_rows(folder) == 2


@pytest.mark.slow
def test_failed_run_says_how_to_continue_only_if_something_is_saved(
    run_partita: Shell, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = runner.log_round

    def fail(*values: object) -> object:
        if values[2].number == 1:  # type: ignore[attr-defined]
            raise OSError("the disk is gone")
        return real(*values)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "log_round", fail)
    folder = tmp_path / "my runs"
    code, _, err = run_partita("run", "-c", config, "--out", folder)
    assert code == 1
    assert f"1 of 3 rounds are saved in {folder}; continue with: partita resume '{folder}'" in err
    monkeypatch.undo()
    run_partita = Shell(monkeypatch, run_partita.capsys)
    code, _, err = run_partita("run", "-c", config, "--out", folder)
    assert code == 1
    assert len(err.splitlines()) == 1, "the error names the options already"


# ---- signals


def stop(words: list[str], sign: signal.Signals, until: Path, pattern: str) -> tuple[int, str]:
    """Start a command, send the signal to it and its children when a file appears, return its exit code and output."""
    with subprocess.Popen(
        [sys.executable, "-m", "partita", *words],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # the tests themselves may run in the background
    ) as process:
        while not list(until.glob(pattern)) and process.poll() is None:
            time.sleep(0.02)
        os.killpg(process.pid, sign)
        _, err = process.communicate(timeout=60)
    return process.returncode, err


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stopped_run_says_how_to_resume(workers: int, config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["run", "-c", str(config), "--out", str(folder), "--rounds", "5000", "--set", f"engine.workers={workers}"]
    code, err = stop(words, signal.SIGINT, folder, "checkpoints/000002*.safetensors")
    assert code == 130
    *lines, stopped, how = err.splitlines()
    assert stopped == "stopped"
    assert re.fullmatch(rf"\d+ of 5000 rounds are saved in {folder}; continue with: partita resume {folder}", how)
    assert all(line.startswith("fedavg: round ") for line in lines), err
    if workers == 1:
        saved = run_folder.saved_rounds(folder)
        code, err = stop(["resume", str(folder), "-q"], signal.SIGTERM, folder, f"checkpoints/{saved + 2:06d}*")
        assert code == 143
        assert err.splitlines()[0] == "stopped"
        assert f"continue with: partita resume {folder}" in err


@pytest.mark.slow
def test_stopped_comparison_says_how_to_continue(config: Path, tmp_path: Path) -> None:
    words = ["compare", "-c", str(config), "--methods", "fedavg", "--seeds", "2", "--jobs", "2"]
    words += ["--out", str(tmp_path / "out"), "--rounds", "5000"]
    for sign, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        saved = max((int(path.name[:6]) for path in tmp_path.glob("out/*/seed-1/checkpoints/*")), default=0)
        pattern = f"out/*/seed-1/checkpoints/{saved + 3:06d}*"
        assert stop(words, sign, tmp_path, pattern) == (
            code,
            "stopped\n0 of 2 runs are finished; start the same command again to continue\n",
        )


# ---- listing


@pytest.mark.slow
def test_list_shows_broken_and_unfinished_runs(run_partita: Shell, config: Path, tmp_path: Path) -> None:
    for seed in (2, 10):
        run_partita(
            "run", "-c", config, "--set", f"seed={seed}", "--rounds", 1, "--out", tmp_path / f"seed-{seed}", "-q"
        )
    broken, unfinished, begun = tmp_path / "broken", tmp_path / "un finished", tmp_path / "begun"
    for folder in (broken, unfinished, begun, tmp_path / "config only"):
        folder.mkdir()
        (folder / "config.toml").write_bytes((tmp_path / "seed-2" / "config.toml").read_bytes())
    row = (tmp_path / "seed-2" / "rows.jsonl").read_text()
    (broken / "rows.jsonl").write_text("{}\n" + row)
    (unfinished / "rows.jsonl").write_text(row)
    (begun / "checksums.json").write_text("{}")
    (tmp_path / "toml").mkdir()
    (tmp_path / "toml" / "config.toml").write_text("seed = ")
    (tmp_path / "toml" / "rows.jsonl").write_text(row)
    code, out, _ = run_partita("ls", tmp_path, "--json")
    assert code == 0
    rows = {Path(row["folder"]).name: row for row in json.loads(out)}
    assert list(rows) == ["begun", "broken", "seed-2", "seed-10", "toml", "un finished"]
    assert "line 1 is not a row with a round" in rows["broken"]["error"]
    assert "is not valid TOML" in rows["toml"]["error"]
    assert (rows["begun"]["rounds"], rows["begun"]["error"]) == ("0/1", None)
    assert (rows["seed-2"]["label"], rows["seed-2"]["rounds"], rows["seed-2"]["finished"]) == ("fedavg", "1/1", True)
    code, out, _ = run_partita("ls", tmp_path)
    assert code == 0
    assert len(out.splitlines()) == 1 + len(rows), "one line each"
    lines = {name: next(line for line in out.splitlines() if f"{tmp_path / name} " in line) for name in rows}
    assert "cannot be read: " in lines["broken"]
    assert f"unfinished: partita resume '{unfinished}'" in lines["un finished"]
    assert lines["seed-10"].rstrip().endswith("finished")
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d", lines["seed-10"])


# ---- other commands and options


def test_missing_matplotlib_is_noticed_before_any_work_and_only_by_figures(
    run_partita: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = main.find_spec
    monkeypatch.setattr(main, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run = write_run(tmp_path, "fedavg", 0, rounds=2)
    remedy = "error: --figures needs matplotlib; install it with: pip install 'partita[report]'\n"
    assert run_partita("report", run, "--figures", tmp_path / "figures") == (1, "", remedy)
    assert not (run / "report.html").exists()
    assert not (tmp_path / "figures").exists()
    code, out, _ = run_partita("report", run)
    assert code == 0
    assert f"report: {run / 'report.html'}" in out
    assert (run / "report.html").exists()


@pytest.mark.slow
def test_methods_command_describes_one_method_in_json(run_partita: Shell) -> None:
    code, out, _ = run_partita("methods", "fedprox", "--json")
    assert code == 0
    shown = json.loads(out)
    [mu] = shown.pop("parameters")
    assert (mu["name"], mu["default"], mu["type"]) == ("mu", 0.01, "a number from 0 to 1e9")
    assert mu["meaning"]
    assert shown["card"].startswith("# fedprox")
    assert (shown["name"], "fedfrozen+fedprox" in shown["compositions"]) == ("fedprox", True)
    assert shown["about"]
    for name in INDEX:
        assert all(each["meaning"] for each in json.loads(run_partita("methods", name, "--json")[1])["parameters"]), (
            name
        )
    assert run_partita("methods", "fedpro", "--json")[0] == 1


def test_run_prints_only_json_on_request(run_partita: Shell, config: Path, tmp_path: Path) -> None:
    words = ("run", "--config", config, "--out", tmp_path / "run", "--json", "--report")
    code, out, err = run_partita(*words)
    assert code == 0
    assert "report: " in err
    assert json.loads(out) == json.loads(run_partita("report", tmp_path / "run", "--json")[1])
    code, out, err = run_partita(*words, "--resume")
    assert (code, "nothing to resume" in err) == (0, True)
    json.loads(out)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("partita comp", ["compare"]),
        ("partita methods fedpr", ["fedprox"]),
        ("partita compare --methods fedavg,fedpr", ["fedavg,fedprox"]),
    ],
)
def test_shell_completes_commands_and_names(line: str, found: list[str]) -> None:
    words = {"_PARTITA_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    command = [sys.executable, "-c", "from partita.cli.main import main; main()"]
    command[2] = "import sys; sys.argv[0] = 'partita'; " + command[2]
    done = subprocess.run(command, env={**os.environ, **words}, capture_output=True, text=True)
    assert done.stdout.split() == found


def test_version_option(run_partita: Shell) -> None:
    code, out, _ = run_partita("--version")
    assert code == 0
    assert re.fullmatch(r"partita \d+\.\d+\.\d+\S*\n", out)


@pytest.mark.parametrize("text", ["../../x", "/etc/x", "..", ".hidden", "a/b", "~", "-rf", "x" * 10_000])
def test_comparison_folder_of_any_option_stays_below_out(text: str, config: Path, tmp_path: Path) -> None:
    [(folder, _)] = expand(config, [], f"pfeddc(init_text={json.dumps(text)})", 1, tmp_path / "out")
    assert folder.parent.parent == tmp_path / "out"
    assert folder.resolve() == folder
    assert len(folder.parent.name.encode()) <= 180
    with pytest.raises(ValueError, match=r"method\.init_text"):
        expand(config, [], 'pfeddc(init_text="a\\u0000b")', 1, tmp_path / "out")


@pytest.mark.slow
def test_a_comparison_lists_its_runs_while_they_are_run(config: Path, tmp_path: Path) -> None:
    planned = expand(config, (), "fedavg,fedprox", 2, tmp_path / "all")
    listed = compare.announce(planned)
    assert listed == tmp_path / "all" / file_names.COMPARISON
    runs = json.loads(listed.read_text())["runs"]
    assert [run["folder"] for run in runs] == [
        f"{label}/seed-{seed}" for label in ("fedavg", "fedprox") for seed in (0, 1)
    ]
    assert {(run["rounds"], run["seed"]) for run in runs} == {(3, 0), (3, 1)}
    assert compare.announce(planned[:1]) is None
    statuses = compare.compare_all(planned, 1)
    next(statuses)
    assert listed.exists()
    statuses.close()
    assert not listed.exists()
