"""Early stopping, the best checkpoint and sampling by losses: decided from the rows, so kills change nothing."""

from __future__ import annotations

import math
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SMALL_TASK, SMALL_VIT
from shell import Shell

from partita.core import tensors
from partita.core.data import ClientData
from partita.core.options import OptionError
from partita.core.sampling import Uniform
from partita.core.settings import RunError
from partita.data import Federation, Subset
from partita.engines.simulation import SimulationEngine
from partita.evaluation import score
from partita.evaluation.metrics import LOSS
from partita.experiment import fits, round_log, run_folder
from partita.experiment.builder import build
from partita.experiment.config import Config, load, parse
from partita.experiment.config_tables import StopConfig
from partita.experiment.early_stopping import best_round, why_stop
from partita.experiment.preview import preview
from partita.experiment.runner import resume, start, start_or_resume
from partita.record import file_names
from partita.record.metric import Metric
from partita.report import load_run
from partita.storage import atomic_files, checkpoint
from partita.storage.atomic_files import DamageError, list_checksummed, number_in_name
from partita.storage.client_store import DiskStore

ACCURACY = Metric("accuracy")
PLATEAU = {"patience": 2, "min_delta": 0.05}


def settings(rounds: int = 8, **tables: Any) -> Config:
    raw = tomllib.loads(SMALL_VIT + SMALL_TASK)
    raw |= {"rounds": rounds, "method": {"name": "fedper"}, "engine": {"clients_per_block": 1}}
    raw["data"] |= {"examples": 90, "test_examples": 10}
    raw["split"] |= {"validation": 0.3, "test": 0.1}
    raw |= {"federation": {"cohort": 2}, "evaluate": {"personal_every": 0, "drift": False}}
    return parse(raw | tables)


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Accuracies on validation by completed rounds, in place of the model's own."""
    values: dict[int, float] = {}
    real = round_log.validate_round

    def replaced(experiment: Any, engine: Any, result: Any) -> dict[str, Any]:
        found = real(experiment, engine, result)
        return found and {"validation": {**found["validation"], "accuracy": values[result.number + 1]}}

    monkeypatch.setattr(round_log, "validate_round", replaced)
    return values


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [{**row, "seconds": 0} for row in run_folder.read_rows(folder)]


def result_of(folder: Path) -> dict[str, Any]:
    return {key: value for key, value in (run_folder.finished(folder) or {}).items() if key != "seconds"}


def bests(folder: Path) -> list[int]:
    return [number_in_name(path) for path in list_checksummed(folder / "checkpoints" / "best")]


# ---- the decision


def numbered(*values: float) -> list[tuple[int, float]]:
    return [(3 * place, value) for place, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("stop", "values", "reason"),
    [
        ({"patience": 2}, (), None),
        ({"patience": 2}, (0.5, 0.4), None),
        ({"patience": 2}, (0.5, 0.4, 0.5), "accuracy on validation has not improved for 2 evaluations"),
        ({"patience": 2}, (0.5, 0.4, 0.6), None),
        ({"patience": 1}, (0.5, 0.5), "accuracy on validation has not improved for 1 evaluation"),
        ({"patience": 1}, (math.nan,), "accuracy on validation has not improved for 1 evaluation"),
        ({"patience": 2}, (0.5, math.nan, math.inf), "accuracy on validation has not improved for 2 evaluations"),
        (PLATEAU, (0.5, 0.54, 0.57), None),
        (PLATEAU, (0.5, 0.52, 0.55), "accuracy on validation has not improved by more than 0.05 for 2 evaluations"),
        ({"target": 0.7}, (0.9, 0.6), None),
        ({"target": 0.7}, (0.6, 0.7), "accuracy on validation has reached 0.7"),
        ({"target": 0.7, "patience": 9}, (0.71,), "accuracy on validation has reached 0.7"),
        ({"target": 0.7, "patience": 1}, (0.5, 0.4), "accuracy on validation has not improved for 1 evaluation"),
    ],
)
def test_decision_follows_from_the_scores(stop: dict[str, Any], values: tuple[float, ...], reason: str | None) -> None:
    assert why_stop(StopConfig(**stop), ACCURACY, numbered(*values)) == reason
    lower = why_stop(
        StopConfig(**{**stop, **({"target": -stop["target"]} if "target" in stop else {})}),
        LOSS,
        numbered(*(-value for value in values)),
    )
    assert lower == (reason and reason.replace("accuracy", "loss").replace("reached ", "reached -"))


def test_best_round_is_the_first_of_equal_finite_scores() -> None:
    assert best_round(ACCURACY, []) is None
    assert best_round(ACCURACY, numbered(math.nan, math.inf)) is None
    assert best_round(ACCURACY, numbered(0.1, 0.4, math.nan, 0.4, 0.2)) == 6
    assert best_round(LOSS, numbered(0.3, 0.1, 0.1)) == 6


# ---- refusals


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"stop": {}}, r"\[stop\] has no condition; set stop\.patience, stop\.target or stop\.epsilon"),
        ({"stop": {"min_delta": 0.1, "target": 1.0}}, r"stop\.min_delta is 0\.1, which has no effect without"),
        ({"stop": {"patience": 0}}, r"stop\.patience is 0; it must be"),
        ({"evaluate": {"validation_metric": "f1", "validation_every": 1}}, "'f1', which this task does not have"),
        (
            {"stop": {"patience": 1}, "split": {"name": "iid", "clients": 3, "validation": 0.001}},
            r"split\.validation is 0\.001: no client has validation examples",
        ),
    ],
)
def test_settings_without_a_sense_are_refused_before_the_run(tables: dict[str, Any], said: str) -> None:
    with pytest.raises((OptionError, RunError), match=said):
        build(settings(**tables))


def private(unit: str, **more: Any) -> dict[str, Any]:
    return {"privacy": {"unit": unit, "noise": 4.0, "accountant": "rdp", "repeatable": True}, **more}


@pytest.mark.parametrize("unit", ["example", "client"])
def test_stop_that_allows_no_round_is_refused(unit: str) -> None:
    said = r"stop\.epsilon is 0\.001 and privacy\.noise is 4\.0: the first round alone costs epsilon [\d.]+; raise stop"
    with pytest.raises(RunError, match=said):
        build(settings(**private(unit, method={"name": "fedavg"}, stop={"epsilon": 0.001})))


def test_sampling_by_size_goes_with_example_level_privacy() -> None:
    build(settings(**private("example", sampling={"name": "by_size"}, method={"name": "fedavg"})))


# ---- validation


def test_validation_is_the_mean_over_the_clients_validation_examples(tmp_path: Path) -> None:
    """The server's model is the same for all clients, so the weighted mean is the score on all examples together."""
    config = settings(2, method={"name": "fedavg"}, evaluate={"validation_every": 2})
    rows = list(start(config, tmp_path / "run"))
    assert ["validation" in row for row in rows] == [False, True]
    experiment = build(load(tmp_path / "run" / "config.toml"))
    [path] = list_checksummed(tmp_path / "run" / "checkpoints" / "best")
    server = checkpoint.read(path, initial=experiment.initial_values).server
    parts = [experiment.federation[client].validation for client in experiment.federation.clients]
    right = sum(
        score(experiment.model, server.params, part, experiment.evaluator)["accuracy"] * len(part) for part in parts
    )
    assert rows[1]["validation"]["accuracy"] == pytest.approx(right / sum(map(len, parts)))
    assert set(rows[1]["validation"]) == {"accuracy", "ece", "loss"}


def test_validation_without_any_score_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulationEngine, "evaluate", lambda self, jobs, on=None: iter([("c0", {})]))
    with pytest.raises(RunError, match=r"none of 3 clients has a score on validation examples in round 0; raise split"):
        list(start(settings(2, evaluate={"validation_every": 1}), tmp_path / "run"))


class OneSite:
    """The clients as a site sees them: it has its own data only, and no validation examples."""

    def __init__(self, federation: Federation) -> None:
        self.federation, self.clients = federation, federation.clients

    def __getitem__(self, client: str) -> ClientData:
        nothing = Subset(self.federation.task.train, torch.arange(0))
        return ClientData(self.federation[client].train if client == "c0" else nothing, nothing, nothing)


def test_site_without_validation_examples_may_build_its_part_of_the_run() -> None:
    config, experiment = settings(evaluate={"validation_every": 1}), build(settings())
    site: Any = OneSite(experiment.federation)
    fits.check(fits.Parts(config, run=experiment.run, federation=site))


# ---- runs


@pytest.mark.slow
def test_run_stops_when_validation_no_longer_improves(
    scores: dict[int, float], tmp_path: Path, run_partita: Shell
) -> None:
    scores |= {1: 0.2, 2: 0.5, 3: 0.4, 4: 0.5, 5: 0.9}
    folder = tmp_path / "run"
    config = settings(stop={"patience": 2}, checkpoint={"every": 3}, evaluate={"every": 3, "validation_every": 1})
    rows = list(start(config, folder))
    assert len(rows) == 4
    assert [bool(row["test"]) for row in rows] == [False, False, True, True], "the last round is tested"
    reason = "accuracy on validation has not improved for 2 evaluations"
    found = result_of(folder)
    assert (found["rounds"], found["stopped"], found["best"]) == (8, {"after": 4, "reason": reason}, {"after": 2})
    assert found["test"] == rows[-1]["test"]
    assert run_folder.stopped(folder) == f"stopped after round 4: {reason}"
    assert run_folder.saved_rounds(folder) == 4
    assert bests(folder) == [2]
    assert list(start_or_resume(config, folder)) == []
    record = load_run(folder)
    assert record.finished
    assert record.stopped == f"stopped after round 4: {reason}"
    _, told, _ = run_partita("resume", folder)
    assert f"{folder} stopped after round 4: {reason}; nothing to resume" in told
    assert f"seed 0: stopped after round 4: {reason}." in told, "a comment of the table"
    assert f"stopped after round 4: {reason}" in run_partita("ls", tmp_path)[1]


@pytest.mark.slow
def test_extended_run_that_stopped_is_the_longer_run(scores: dict[int, float], tmp_path: Path) -> None:
    """The longer run would have stopped in the same round, so an extension computes nothing."""
    scores |= {1: 0.5, 2: 0.4, 3: 0.3, 4: 0.9, 5: 0.2, 6: 0.1}
    folder, stop = tmp_path / "run", {"stop": {"patience": 2}}
    list(start(settings(5, **stop), folder))
    assert list(resume(load(folder / "config.toml"), folder, 8)) == []
    list(start(settings(8, **stop), tmp_path / "whole"))
    assert result_of(folder) == result_of(tmp_path / "whole")
    assert rows_of(folder) == rows_of(tmp_path / "whole")
    assert (folder / "config.toml").read_bytes() == (tmp_path / "whole" / "config.toml").read_bytes()
    assert run_folder.verify(folder)


@pytest.mark.slow
def test_extended_run_that_did_not_stop_goes_on_and_may_stop(scores: dict[int, float], tmp_path: Path) -> None:
    scores |= {1: 0.5, 2: 0.4, 3: 0.6, 4: 0.5, 5: 0.4, 6: 0.9}
    folder, stop = tmp_path / "run", {"stop": {"patience": 2}}
    list(start(settings(4, **stop), folder))
    assert "stopped" not in result_of(folder)
    assert len(list(resume(load(folder / "config.toml"), folder, 8))) == 1
    list(start(settings(8, **stop), tmp_path / "whole"))
    assert result_of(folder) == result_of(tmp_path / "whole")
    assert rows_of(folder)[-1] == rows_of(tmp_path / "whole")[-1]


@pytest.mark.slow
def test_stop_by_epsilon_ends_before_the_limit(tmp_path: Path) -> None:
    config = settings(6, **private("example", method={"name": "fedavg"}, federation={"cohort": 1.0}))
    free = [row["privacy"]["epsilon"] for row in start(config, tmp_path / "free")]
    limit = (free[2] + free[3]) / 2
    folder, tables = tmp_path / "run", private("example", method={"name": "fedavg"}, federation={"cohort": 1.0})
    rows = list(start(settings(6, **tables, stop={"epsilon": limit}), folder))
    assert [row["privacy"]["epsilon"] for row in rows] == free[:3]
    reason = f"one more round would raise epsilon to {free[3]:.4g}, above {limit:g}"
    assert result_of(folder)["stopped"] == {"after": 3, "reason": reason}
    assert "best" not in result_of(folder)
    # A run that ends by itself before the limit is extended to the limit, not beyond.
    short = tmp_path / "short"
    list(start(settings(3, **tables, stop={"epsilon": limit}), short))
    assert "stopped" not in result_of(short)
    assert list(resume(load(short / "config.toml"), short, 6)) == []
    assert result_of(short) == result_of(folder)


# ---- kills


KILLED: dict[str, Any] = {
    "stop": {"patience": 3},
    "sampling": {"name": "power_of_choice", "candidates": 3},
    "checkpoint": {"every": 3},
    "federation": {"cohort": 1},
    "engine": {"clients_per_block": 1, "client_state": "disk"},
}
ACCURACIES = {1: 0.2, 2: 0.5, 3: 0.4, 4: 0.6, 5: 0.7, 6: 0.3, 7: 0.7, 8: 0.1, 9: 1.0}


class Killed(BaseException):
    """A kill: the process does nothing more."""


@contextmanager
def kill_at(step: int) -> Iterator[None]:
    """Die before the `step`-th change of a file."""
    count = 0

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*given: Any, **more: Any) -> Any:
            nonlocal count
            if file_names.PROGRESS in str(given[0]):  # written by a thread, at any time
                return real(*given, **more)
            count += 1
            if count >= step:
                raise Killed
            return real(*given, **more)

        return change

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", dying(os.replace))
        patch.setattr(os, "link", dying(os.link))
        patch.setattr(Path, "unlink", dying(Path.unlink))
        patch.setattr(atomic_files, "append", dying(atomic_files.append))
        yield


def go_on(config: Config, folder: Path) -> None:
    begun = (folder / file_names.CONFIG).exists()
    for _ in resume(load(folder / file_names.CONFIG), folder) if begun else start(config, folder):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("first", range(3))
def test_kill_before_any_change_of_a_file_does_not_change_the_result(
    first: int, scores: dict[int, float], tmp_path: Path
) -> None:
    """Kills come every few changes, at other places for each `first`."""
    scores |= ACCURACIES
    config, whole, killed = settings(9, **KILLED), tmp_path / "whole", tmp_path / "killed"
    go_on(config, whole)
    assert result_of(whole)["stopped"]["after"] == 8
    kills = 0
    while run_folder.finished(killed) is None:
        assert kills < 60, "no progress"
        try:
            with kill_at(8 + (7 * kills + 2 * first) % 12):
                go_on(config, killed)
        except Killed:
            kills += 1
    assert kills >= 4
    assert result_of(killed) == result_of(whole)
    assert rows_of(killed) == rows_of(whole)
    assert bests(killed)[-1] == bests(whole)[-1] == 5
    one, two = (checkpoint.best(each / "checkpoints", initial=build(config).initial_values) for each in (whole, killed))
    assert one is not None
    assert two is not None
    assert tensors.equal(one.server.params, two.server.params)
    for client in one.states:
        states = [DiskStore(each / "clients", newest=one.states).load(client, one.done) for each in (whole, killed)]
        assert states[0].personal
        assert tensors.equal(states[0].personal, states[1].personal)


# ---- the best checkpoint


@pytest.mark.slow
def test_best_checkpoint_holds_the_server_and_the_clients_of_its_round(
    scores: dict[int, float], tmp_path: Path
) -> None:
    scores |= {1: 0.1, 2: 0.8, 3: 0.2, 4: 0.3, 5: 0.4, 6: 0.5}
    folder = tmp_path / "run"
    list(start(settings(6, evaluate={"validation_every": 1}), folder))
    list(start(settings(2), tmp_path / "two"))
    experiment = build(load(folder / "config.toml"))
    best = checkpoint.best(folder / "checkpoints", run_folder.verify(folder), initial=experiment.initial_values)
    assert best is not None
    assert (best.done, result_of(folder)["best"]) == (2, {"after": 2})
    [*_, newest] = list_checksummed(tmp_path / "two" / "checkpoints")
    wanted = checkpoint.read(newest, initial=experiment.initial_values)
    assert tensors.equal(best.server.params, wanted.server.params)
    assert best.states == wanted.states
    for client in best.states:
        own = DiskStore(folder / "clients", newest=best.states).load(client, best.done)
        assert tensors.equal(own.personal, DiskStore(tmp_path / "two" / "clients").load(client, 2).personal)


@pytest.mark.slow
def test_damaged_or_missing_best_checkpoint_is_named_by_resume(scores: dict[int, float], tmp_path: Path) -> None:
    scores |= dict.fromkeys(range(1, 7), 0.1) | {1: 0.9}
    half, config = tmp_path / "half", settings(6, evaluate={"validation_every": 1})
    rows = start(config, half)
    for _ in range(4):
        next(rows)
    rows.close()  # type: ignore[attr-defined]
    go_on(config, tmp_path / "whole")
    for damage in (lambda path: path.unlink(), lambda path: path.write_bytes(b"x")):
        folder = shutil.copytree(half, tmp_path / "run", dirs_exist_ok=True)
        [path] = list_checksummed(folder / "checkpoints" / "best")
        damage(path)
        with pytest.raises(DamageError, match=r"checkpoints/best.* delete the folder 'checkpoints' to run all rounds"):
            go_on(config, folder)
        shutil.rmtree(folder / "checkpoints")
        go_on(config, folder)
        assert result_of(folder) == result_of(tmp_path / "whole")
        assert bests(folder) == [1]
        shutil.rmtree(folder)


@pytest.mark.slow
def test_overwriting_removes_the_best_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    list(start(settings(2, evaluate={"validation_every": 1}), folder))
    assert bests(folder)
    list(start(settings(1), folder, overwrite=True))
    assert not (folder / "checkpoints" / "best").exists()
    with run_folder.lock(folder):
        run_folder.remove_run(folder)
    assert not (folder / "checkpoints").exists()


# ---- sampling in a run


def test_sampling_by_losses_records_them_and_other_rules_do_not(tmp_path: Path) -> None:
    for name in ("power_of_choice", "by_size"):
        rows = list(start(settings(2, sampling={"name": name}), tmp_path / name))
        assert [row.get("losses", {}).keys() == set(row["cohort"]) for row in rows] == [name == "power_of_choice"] * 2


@pytest.mark.slow
def test_extended_run_that_samples_by_losses_is_the_longer_run(tmp_path: Path) -> None:
    tables = {"sampling": {"name": "power_of_choice", "candidates": 3}, "federation": {"cohort": 1}}
    folder = tmp_path / "run"
    list(start(settings(3, **tables), folder))
    list(resume(load(folder / "config.toml"), folder, 6))
    list(start(settings(6, **tables), tmp_path / "whole"))
    assert result_of(folder)["digest"] == result_of(tmp_path / "whole")["digest"]
    assert [row["cohort"] for row in rows_of(folder)] == [row["cohort"] for row in rows_of(tmp_path / "whole")]


def test_small_cohort_of_available_clients_raises_an_alarm(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("round,client,work\n0,c0,1\n0,c2,0.5\n1,c1,1\n")
    rows = list(start(settings(2, sampling={"name": "available", "trace": str(trace)}), tmp_path / "run"))
    assert [sorted(row["cohort"]) for row in rows] == [["c0", "c2"], ["c1"]]
    assert "alarms" not in rows[0]
    assert rows[1]["alarms"]["small cohort"].startswith("only 1 of 2 clients were asked")
    with pytest.raises(OptionError, match="has 0 available clients in round 2"):
        list(resume(load(tmp_path / "run" / "config.toml"), tmp_path / "run", 3))


def test_plan_of_a_run_that_samples_by_losses_says_how_it_draws(tmp_path: Path) -> None:
    by_loss = preview(settings(3, sampling={"name": "power_of_choice"}), 2, None)
    assert by_loss.sampled
    assert "draws cohorts uniformly; in a run, they depend on the losses" in by_loss.to_text()
    by_size = preview(settings(3, sampling={"name": "by_size"}), 2, None)
    assert not by_size.sampled
    assert by_size.client == build(settings(3, sampling={"name": "by_size"})).run.draw_cohort(2, ["c0", "c1", "c2"])[0]


def test_centralized_training_ignores_the_sampling_rule() -> None:
    assert build(settings(method={"name": "centralized"}, sampling={"name": "by_size"})).run.sampling == Uniform()
