"""Tuning under one budget: what is run, what is chosen, and that kills change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from helpers import SMALL_TASK, SMALL_VIT
from shell import Shell

from partita import report
from partita.core.client import ClientError
from partita.core.options import OptionError
from partita.experiment import compare, run_folder, tuning
from partita.experiment.config import load
from partita.experiment.run_folder import RunFolderError
from partita.experiment.tuning import Options, Study, Trial, chosen, plan_tuning, tune_method
from partita.report.trials import load_tuning, notes, tables

LR = "training.lr=log(1e-3,1)"
OPTIONS = Options("fedavg,fedprox", (LR, "fedprox: method.mu=choice(0.1,1)"), budget=4)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(f'method.name = "fedavg"\nrounds = 4\nevaluate.samples = 0\n{SMALL_VIT}{SMALL_TASK}')
    return file


def plan(config: Path, out: Path, options: Options = OPTIONS, changes: tuple[str, ...] = ()) -> list[Study]:
    return plan_tuning(config, changes, options, out)


def tune_here(studies: list[Study], out: Path) -> dict[str, list[Trial]]:
    """Tune in this process, one method after the other."""
    run_folder.write_json(out / "tune.json", tuning._asked(studies, studies[0].options))
    for study in studies:
        tune_method(study)
    tuning._write_chosen(studies, out)
    return {study.default.label: study.trials() for study in studies}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished tuning of two methods."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "config.toml").write_text(f'method.name = "fedavg"\nrounds = 4\n{SMALL_VIT}{SMALL_TASK}')
    tune_here(plan(folder / "config.toml", folder / "out"), folder / "out")
    return folder


def rows_of(trials: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for file in sorted(trials.rglob("rows.jsonl")):
        for row in run_folder.read_rows(file.parent):
            yield file.parent, row


@pytest.mark.slow
def test_every_method_gets_the_budget_and_starts_with_the_config(whole: Path) -> None:
    studies = plan(whole / "config.toml", whole / "out")
    found = {study.default.label: study.trials() for study in studies}
    assert {label: len(trials) for label, trials in found.items()} == {"fedavg": 4, "fedprox": 4}
    assert found["fedavg"][0].settings == {"training.lr": "0.1"}
    assert found["fedprox"][0].settings == {"training.lr": "0.1", "method.mu": "0.01"}
    for trials in found.values():
        assert [trial.number for trial in trials] == [0, 1, 2, 3]
        assert trials[0].state == "complete"
        assert {trial.state for trial in trials} <= {"complete", "pruned"}
        assert all(trial.rounds == (4 if trial.state == "complete" else len(trial.scores)) for trial in trials)
        assert all(trial.score == trial.scores[-1][1] for trial in trials if trial.state == "complete")


def test_no_trial_touches_a_test_set(whole: Path) -> None:
    rows = list(rows_of(whole / "out" / "trials"))
    assert rows
    for _, row in rows:
        assert row["test"] is None
        assert row["personal"] is None
        assert row["validation"].keys() == {"accuracy", "ece", "loss"}
    for folder, _ in rows:
        assert (run_folder.finished(folder) or {"test": None})["test"] is None


@pytest.mark.slow
def test_test_set_is_never_evaluated(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the test set was evaluated")

    monkeypatch.setattr("partita.experiment.round_log.evaluate", refuse)
    tune_here(plan(config, tmp_path / "out", replace(OPTIONS, budget=1)), tmp_path / "out")


@pytest.mark.slow
def test_seeds_of_trials_are_not_those_of_a_comparison(whole: Path) -> None:
    seeds = {load(folder / "config.toml").seed for folder, _ in rows_of(whole / "out" / "trials")}
    assert seeds == {10_000}


def test_ended_trials_keep_no_checkpoints(whole: Path) -> None:
    assert not [*(whole / "out").rglob("checkpoints")]
    assert not [*(whole / "out").rglob("clients")]


def test_best_trial_is_chosen_and_written_as_a_config(whole: Path) -> None:
    for study in plan(whole / "config.toml", whole / "out"):
        best = chosen(study)
        complete = [trial for trial in study.trials() if trial.score is not None]
        assert best.score == max(trial.score or 0 for trial in complete)
        written = load(whole / "out" / "chosen" / f"{study.default.label}.toml")
        assert written.training.lr == float(best.settings["training.lr"])
        assert written.evaluate == study.default.evaluate  # not those of the trials
        assert written.seed == study.default.seed


@pytest.mark.slow
def test_first_of_equal_trials_is_chosen_and_loss_is_minimized(config: Path, tmp_path: Path) -> None:
    study = plan(config, tmp_path / "out")[0]
    loss = {"name": "loss", "higher_is_better": False, "fraction": False}
    for number, score in enumerate((0.5, 0.3, 0.3)):
        tuning._write(study, Trial(number, {}, "complete", loss, score))
    assert chosen(study).number == 1


class Killed(BaseException):
    pass


@pytest.mark.slow
def test_killed_tuning_continues_as_if_nothing_had_happened(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed after every third round, in the middle of trials, and at other moments too."""
    left = 0

    def count() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed

    real_start, real_write = tuning.start_or_resume, tuning._write

    def start(*arguments: Any) -> Iterator[Any]:
        for row in real_start(*arguments):
            yield row
            count()

    def write(study: Study, trial: Trial) -> None:
        count()
        real_write(study, trial)

    monkeypatch.setattr(tuning, "start_or_resume", start)
    monkeypatch.setattr(tuning, "_write", write)
    out, kills = tmp_path / "out", 0
    studies = plan(whole / "config.toml", out)
    while True:
        left = 3
        try:
            found = tune_here(studies, out)
        except Killed:
            kills += 1
            continue
        break
    assert kills > 8
    assert found == {study.default.label: study.trials() for study in plan(whole / "config.toml", whole / "out")}
    same = [
        [(str(folder.relative_to(top)), {**row, "seconds": 0}) for folder, row in rows_of(top)]
        for top in (out / "trials", whole / "out" / "trials")
    ]
    assert same[0] == same[1]


@pytest.mark.slow
def test_diverged_trial_fails_and_the_tuning_goes_on(config: Path, tmp_path: Path) -> None:
    options = Options("fedavg", ("training.lr=choice(1e8,0.1,0.2)",), budget=4, search="grid")
    [trials] = tune_here(plan(config, tmp_path / "out", options), tmp_path / "out").values()
    assert [(trial.settings["training.lr"], trial.state) for trial in trials] == [
        ("0.1", "complete"),
        ("100000000", "failed"),
        ("0.2", "complete"),
    ]
    assert "lower training.lr" in trials[1].reason
    assert trials[1].score is None
    loaded = load_tuning(tmp_path / "out")
    assert any("fedavg, trial 1 failed: client" in note for note in notes(loaded))


@pytest.mark.slow
def test_config_that_cannot_run_ends_the_tuning(config: Path, tmp_path: Path) -> None:
    studies = plan(config, tmp_path / "out", replace(OPTIONS, metric="f1"))
    with pytest.raises(OptionError, match="which this task does not have"):
        tune_method(studies[0])


@pytest.mark.slow
def test_without_a_complete_trial_nothing_is_chosen(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ClientError("c0", "the loss is nan")

    monkeypatch.setattr(tuning, "start_or_resume", fail)
    with pytest.raises(OptionError, match="no trial of fedavg is complete"):
        tune_here(plan(config, tmp_path / "out"), tmp_path / "out")


@pytest.mark.slow
def test_seeds_are_averaged(config: Path, tmp_path: Path) -> None:
    options = Options("fedavg", (LR,), budget=1, seeds=2)
    [[trial]] = tune_here(plan(config, tmp_path / "out", options, ("rounds=2",)), tmp_path / "out").values()
    finals = [
        list(run_folder.read_rows(folder))[-1]["validation"]["accuracy"]
        for folder in sorted((tmp_path / "out" / "trials" / "fedavg" / "000").glob("seed-*"))
    ]
    assert len(finals) == 2
    assert trial.score == pytest.approx(sum(finals) / 2)
    assert [step for step, _ in trial.scores] == [1, 2, 3, 4]
    assert trial.rounds == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "changes", "reason"),
    [
        (replace(OPTIONS, budget=5), (), "--budget is 4 there and 5 here"),
        (replace(OPTIONS, seed=1), (), "--seed is 0 there and 1 here"),
        (replace(OPTIONS, prune=False), (), "--prune is True there and False here"),
        (replace(OPTIONS, methods="fedavg", spaces=(LR,)), (), "--methods is fedavg,fedprox there and fedavg here"),
        (OPTIONS, ("training.momentum=0.5",), "training.momentum of fedavg is 0 there and 0.5 here"),
        (replace(OPTIONS, spaces=("training.lr=log(1e-2,1)", *OPTIONS.spaces[1:])), (), "spaces of fedavg is"),
    ],
)
def test_other_arguments_over_a_tuning_are_named(
    whole: Path, options: Options, changes: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(RunFolderError, match="holds another tuning") as error:
        plan(whole / "config.toml", whole / "out", options, changes)
    assert reason in str(error.value)
    plan(whole / "config.toml", whole / "out", OPTIONS, ("engine.threads=1",))  # how it is computed may differ


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        (("split.validation=0",), OPTIONS, "no client has validation examples"),
        (("evaluate.validation_every=9",), OPTIONS, "only 4 rounds"),
        (("privacy.noise=1",), OPTIONS, "does not cover; tune on public data of the same kind, or accept"),
        (
            ("privacy.noise=1", "privacy.unit=client"),
            replace(OPTIONS, disclose_validation=True),
            "tune on public data of the same kind",
        ),
        ((), replace(OPTIONS, disclose_validation=True), "is for a config with a table"),
        ((), replace(OPTIONS, budget=0), "--budget is 0"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_any_run(
    config: Path, tmp_path: Path, changes: tuple[str, ...], options: Options, reason: str
) -> None:
    with pytest.raises(OptionError) as error:
        plan(config, tmp_path / "out", options, changes)
    assert reason in str(error.value)


@pytest.mark.slow
def test_private_trials_are_added_up_and_the_page_warns(config: Path, tmp_path: Path) -> None:
    options = Options("fedavg", (LR,), budget=2, disclose_validation=True, prune=False)
    changes = ("privacy.noise=4", "privacy.accountant=rdp", "rounds=1")
    [trials] = tune_here(plan(config, tmp_path / "out", options, changes), tmp_path / "out").values()
    rows = [row for _, row in rows_of(tmp_path / "out" / "trials")]
    assert [trial.epsilon for trial in trials] == [row["privacy"]["epsilon"] for row in rows]
    assert len({path.read_bytes() for path in (tmp_path / "out").rglob("private/secret")}) == len(trials) == 2
    assert all(row["validation"]["accuracy"] >= 0 and row["train_loss"] is None for row in rows)
    told = "\n".join(notes(load_tuning(tmp_path / "out")))
    total = sum(trial.epsilon or 0 for trial in trials)
    assert f"all trials together have spent ε {total:.2f} at δ" in told
    assert "no guarantee at all" in told
    about = json.loads(next((tmp_path / "out").rglob("privacy.json")).read_text())
    assert any(text.startswith("validation: ") for text in about["not_covered"])
    assert not any(text.startswith("validation: ") for text in about["withheld"])


def test_trials_are_no_runs_of_a_report(whole: Path) -> None:
    with pytest.raises(report.ReportError, match="no run at or below"):
        report.load_runs([whole / "out"])


@pytest.mark.slow
def test_tune_then_compare_shows_every_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tmp_path / "config.toml", tmp_path / "out"
    config.write_text(f'method.name = "fedavg"\nrounds = 1\n{SMALL_VIT}{SMALL_TASK}')

    def run_here(work: Callable[..., None], tasks: Mapping[str, tuple[Any, ...]], _: int) -> Iterator[tuple[str, ...]]:
        for name, arguments in tasks.items():
            work(*arguments)
            yield (name,)

    monkeypatch.setattr(tuning, "run_in_processes", run_here)
    monkeypatch.setattr(compare, "run_in_processes", run_here)
    shell = Shell(monkeypatch, capsys)
    words = ("tune", "-c", config, "--methods", "fedavg", "--space", LR, "--budget", 2, "--out", out, "--jobs", 1)
    code, text, shown = shell(*words, "--then-compare", 1, "--report")
    assert code == 0, shown
    best = next(trial for trial in load_tuning(out).methods[0].trials if trial.chosen)
    assert "fedavg: 2 of 2 trials, 2 rounds" in text
    assert "fedavg: trial 1 of 2" in shown
    [run] = report.load_runs([out])
    assert (run.seed, run.config["training"]["lr"]) == (0, float(best.settings["training.lr"]))
    page = (out / "compare" / "report.html").read_text()
    assert "Trials of the tuning" in page
    for trial in load_tuning(out).methods[0].trials:
        assert trial.settings["training.lr"] in page
    code, text, _ = shell(*words, "--json")  # all trials are there already
    assert code == 0
    found = json.loads(text)
    assert [trial["number"] for trial in found["methods"][0]["trials"]] == [0, 1]
    assert found["compare"].startswith("partita compare --config")
    code, text, _ = shell(*words, "--markdown")
    assert "| trial | training.lr |" in text


def test_tune_needs_optuna(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr("partita.cli.tune.find_spec", lambda _: None)
    code, _, shown = Shell(monkeypatch, capsys)("tune", "-c", tmp_path / "no.toml", "--methods", "a", "--space", "b")
    assert code == 1
    assert "pip install 'partita[tune]'" in shown


def test_names_in_trials_stay_text(whole: Path, tmp_path: Path) -> None:
    """A folder may come from a stranger."""
    evil = "</script><script>alert(1)</script>"
    folder = tmp_path / "trials" / "x" / "000"
    folder.mkdir(parents=True)
    method = {"label": evil, "folder": "x", "spaces": [evil]}
    asked = {"methods": [method], "budget": 1, "seeds": 1, "search": evil, "prune": True, "rounds": 1, "first_seed": 0}
    (tmp_path / "tune.json").write_text(json.dumps(asked))
    metric = {"name": evil, "higher_is_better": True, "fraction": True}
    trial = {**asdict(Trial(0, {evil: evil}, "failed", metric, reason=evil)), "state": evil}
    (folder / "trial.json").write_text(json.dumps(trial))
    run = tmp_path / "compare" / "fedavg" / "seed-0"
    source = next(folder for folder, _ in rows_of(whole / "out" / "trials"))
    run.mkdir(parents=True)
    for name in ("config.toml", "rows.jsonl", "plan.json"):
        run.joinpath(name).write_bytes((source / name).read_bytes())
    page = report.page(report.load_runs([tmp_path]), tmp_path / "page.html").read_text()
    assert evil not in page
    assert "alert(1)" in page


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"folder": "../x"}, "names the folder '../x'"), ({"folder": 3}, "must be a string"), ({"spaces": 3}, "a list")],
)
def test_damaged_tuning_is_named(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    method = {"label": "a", "folder": "x", "spaces": [], **change}
    asked = {"methods": [method], "budget": 1, "seeds": 1, "search": "tpe", "prune": True, "rounds": 1, "first_seed": 0}
    (tmp_path / "tune.json").write_text(json.dumps(asked))
    with pytest.raises(report.ReportError, match="restore it as it was written") as error:
        tables(load_tuning(tmp_path))
    assert reason in str(error.value)
