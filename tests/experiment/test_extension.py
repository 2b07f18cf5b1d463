"""An extended run is bit for bit the run with all rounds from the start, or the extension is refused."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers import SMALL_TASK, SMALL_VIT, server_in
from method_options import BRIEF
from shell import Shell

from partita.core import tensors
from partita.core.client_rule import ClientRule, Context
from partita.core.data import Examples
from partita.core.method import Method
from partita.core.model import Model
from partita.core.plan import Plan, RoundInfo, share_everything
from partita.core.rng import Key
from partita.core.server_rule import Server, ServerRule
from partita.core.tensors import Slots, Tensors
from partita.experiment import builder, run_folder
from partita.experiment.config import Config, load, parse
from partita.experiment.extension import ExtensionError, reads_total
from partita.experiment.runner import resume, start
from partita.methods import INDEX, NEEDS_DUAL_ENCODER, NEEDS_FACTORS, build
from partita.methods.fedfrozen import fedfrozen
from partita.record import file_names
from partita.storage import atomic_files
from partita.storage.atomic_files import DamageError, DiskError
from partita.storage.initial_values import flatten

SHORT, LONG = 2, 4


def settings(method: Mapping[str, Any], rounds: int, **tables: Any) -> Config:
    raw = tomllib.loads(SMALL_VIT + SMALL_TASK) | {"rounds": rounds, "method": dict(method)}
    raw["data"]["examples"] = 60
    raw |= {"federation": {"cohort": 2}, "engine": {"clients_per_block": 1}, "evaluate": {"every": 3}}
    if method["name"] == "fedadamw":
        raw["training"] |= {"optimizer": "adamw"}
    if method["name"] in NEEDS_DUAL_ENCODER:
        raw |= {"model": {"name": "clip", "shape": "tiny"}}
    if method["name"] in NEEDS_FACTORS:
        raw["model"] |= {"adapter": {"rank": 2}}
    return parse(raw | tables)


def play(config: Config, folder: Path, stop: int | None = None) -> Path:
    run = start(config, folder)
    for row in run:
        if row["round"] + 1 == stop:
            break
    run.close()  # type: ignore[attr-defined]
    return folder


def extend(folder: Path, rounds: int | None = LONG) -> Path:
    for _ in resume(load(folder / file_names.CONFIG), folder, rounds):
        pass
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows_of(folder: Path, evaluated: int | None = None) -> list[dict[str, Any]]:
    """The rows without times, and without the scores of the round that only a shorter run evaluates."""
    rows = [{**row, "seconds": 0} for row in run_folder.read_rows(folder)]
    own = {"test": None, "personal": None, "confusion": None}  # a confusion matrix only if it is the last round
    return [{**row, **own} if row["round"] == evaluated else row for row in rows]


def assert_same(extended: Path, whole: Path) -> None:
    one, two = server_in(extended), server_in(whole)
    assert tensors.equal(flatten(one), flatten(two))
    assert one.versions == two.versions
    assert rows_of(extended, SHORT - 1) == rows_of(whole, SHORT - 1)
    for name in (file_names.CONFIG, file_names.PLAN, file_names.PRIVACY):
        if (whole / name).exists():
            assert (extended / name).read_bytes() == (whole / name).read_bytes(), name
    results = [run_folder.finished(folder) for folder in (extended, whole)]
    assert results[0]
    assert results[1]
    assert [results[0][key] for key in ("rounds", "digest", "test")] == [
        results[1][key] for key in ("rounds", "digest", "test")
    ]


# ---- every method

FAST = {"fedavg", "scaffold", "fedper", "fedadam"}
# Of the methods with prompts, two: their rules have nothing of rounds, and their state is that of others.
METHODS = [name for name in INDEX if name not in NEEDS_DUAL_ENCODER or name in ("pfeddc", "coop")]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in FAST else pytest.mark.slow) for each in METHODS]
)
def test_extended_run_is_the_longer_run(name: str, tmp_path: Path) -> None:
    method = {"name": name, **BRIEF.get(name, {})}
    folder = play(settings(method, SHORT), tmp_path / "run")
    assert_same(extend(folder), play(settings(method, LONG), tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 3])
def test_unfinished_and_twice_extended_runs_are_exact(stop: int, tmp_path: Path) -> None:
    """Also with rows after the last checkpoint, and with a warm-up that is over before the first extension."""
    method, tables = {"name": "fedfrozen+moon", "warmup": 1}, {"checkpoint": {"every": 2}}
    folder = play(settings(method, 3, **tables), tmp_path / "run", stop)
    extend(extend(folder, 4), 5)
    whole = play(settings(method, 5, **tables), tmp_path / "whole")
    assert tensors.equal(flatten(server_in(folder)), flatten(server_in(whole)))
    assert (
        json.loads((folder / file_names.RESULT).read_text())["digest"]
        == (json.loads((whole / file_names.RESULT).read_text())["digest"])
    )
    assert run_folder.verify(folder)


# ---- refusals

NOISE = {"privacy": {"noise": 2.0, "accountant": "rdp", "repeatable": True}}


def schedule(kind: str) -> dict[str, Any]:
    return {"training": {"optimizer": "sgd", "lr": 0.1, "schedule": kind}}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        (schedule("cosine"), "the learning rate of round 1 was 0.05 and would have been 0.0853553"),
        (schedule("linear"), "with training.schedule 'linear', the learning rate of round 1"),
        ({"method": {"name": "fedfrozen", "warmup": 0.5}}, "fedfrozen: the plan of round 1 depends on the number of"),
        ({"method": {"name": "fedfrozen", "warmup": "auto"}}, "on RoundInfo.rounds and on signals that were not"),
        ({"privacy": {"epsilon": 8.0, "accountant": "rdp", "repeatable": True}}, "privacy.epsilon needs noise"),
    ],
    ids=["cosine", "linear", "fraction", "auto", "epsilon"],
)
def test_what_depends_on_the_number_of_rounds_is_refused(tables: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = play(settings(rounds=SHORT, **{"method": {"name": "fedavg"}, **tables}), tmp_path / "run")
    before = contents(folder)
    with pytest.raises(
        ExtensionError, match=f"from 2 to 4 rounds: .*{reason}.*; start a new run: partita run --config"
    ):
        extend(folder)
    assert contents(folder) == before


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("tables", [schedule("step"), NOISE], ids=["step", "noise"])
def test_what_does_not_depend_on_the_number_of_rounds_is_extended(tables: dict[str, Any], tmp_path: Path) -> None:
    folder = play(settings({"name": "fedavg"}, SHORT, **tables), tmp_path / "run")
    assert_same(extend(folder), play(settings({"name": "fedavg"}, LONG, **tables), tmp_path / "whole"))


@pytest.mark.slow
def test_extension_beyond_the_budget_is_refused(tmp_path: Path) -> None:
    budget = {"privacy": {**NOISE["privacy"], "epsilon": 20.0}}
    folder = play(settings({"name": "fedavg"}, SHORT, **budget), tmp_path / "run")
    with pytest.raises(ValueError, match="4000 rounds cost epsilon"):
        extend(folder, 4000)


class Annealed(ClientRule):
    """Its memory depends on the number of rounds."""

    slots = frozenset({"share"})

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        part = _share(ctx.round_info)
        return {}, {"share": {name: params[name] * part for name in steps}}


class AnnealedStart(ClientRule):
    """Its start depends on the number of rounds."""

    def start(self, params: Tensors, examples: Examples, ctx: Context, key: Key) -> tuple[Tensors, Slots]:
        return {name: params[name] * _share(ctx.round_info) for name in ctx.plan.train}, {}


def _share(info: RoundInfo) -> float:
    return info.round / info.rounds


class Signals(ServerRule):
    def signal(self, server: Server) -> Mapping[str, float]:
        return {"late": 0.0}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (Method("annealed", client_rules=(Annealed(),)), r"Annealed\.finish reads RoundInfo\.rounds"),
        (Method("annealed", client_rules=(AnnealedStart(),)), r"AnnealedStart\.start reads RoundInfo\.rounds"),
        (Method("signals", fedfrozen(0.9).plan, server_rule=Signals()), "on signals that were not recorded"),
    ],
    ids=["rule", "start", "signal"],
)
def test_code_that_reads_the_number_of_rounds_is_refused(
    method: Method, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partita.experiment.builder.build_method", lambda options: method)
    monkeypatch.setattr("partita.experiment.extension.build_method", lambda options: method)
    folder = play(settings({"name": "fedavg"}, SHORT), tmp_path / "run")
    with pytest.raises(ExtensionError, match=reason):
        extend(folder)


class PlanObject:
    def __call__(self, model: Model, info: RoundInfo) -> Plan:
        assert info.round <= info.rounds
        return share_everything(model, info)


def test_reads_total_finds_the_attribute_however_it_is_reached() -> None:
    def closure(planner: Callable[..., object]) -> Callable[..., object]:
        return lambda model, info: planner(model, info)

    reading = [_share, PlanObject(), PlanObject().__call__, closure(_share), partial(closure, _share), Annealed.finish]
    assert all(map(reads_total, [*reading, lambda: [_share(each) for each in ()]]))
    assert not any(map(reads_total, [None, share_everything, closure(share_everything), build("fedpart").plan, len]))


# ---- the command line


@pytest.mark.slow
def test_resume_rounds_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell, config = Shell(monkeypatch, capsys), settings({"name": "fedavg"}, SHORT)
    folder = play(config, tmp_path / "run")
    about_it = (folder / "audit.json", folder / "samples.json")
    for file in about_it:
        file.write_text("{}")
    code, _, err = shell("resume", folder, "--rounds", 1)
    assert code == 1
    assert f"{folder} is a run of 2 rounds, of which 2 are done" in err
    assert shell("resume", folder, "--rounds", 2)[0] == 0
    assert all(file.exists() for file in about_it)
    assert shell("resume", folder, "--rounds", LONG)[0] == 0
    assert not any(file.exists() for file in about_it)
    assert_same(folder, play(settings({"name": "fedavg"}, LONG), tmp_path / "whole"))
    assert "is finished; nothing to resume" in shell("resume", folder)[1]


# ---- interruptions


class Killed(BaseException):
    """Not an Exception, as a kill cannot be handled."""


def interrupt(monkeypatch: pytest.MonkeyPatch, at: int | None) -> list[str]:
    """Stop before the call number `at` that changes a file in the run folder. Returns the calls."""
    calls: list[str] = []

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counted(path: Any, *args: Any, **kwargs: Any) -> Any:
            if file_names.PROGRESS in str(path):  # written by a thread, at any time
                return real(path, *args, **kwargs)
            if len(calls) == at:
                raise Killed
            calls.append(f"{name} {Path(path).name}")
            return real(path, *args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    watch(os, "replace")
    watch(Path, "unlink")
    watch(atomic_files, "append")
    return calls


@pytest.mark.slow
def test_extension_killed_at_any_change_is_the_old_run_or_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("partita.experiment.builder.draw", lambda: Key(77))
    private = {"privacy": {"noise": 2.0, "accountant": "rdp"}}
    config = settings({"name": "fedavg"}, SHORT, **private)
    short = play(config, tmp_path / "short")
    whole = play(settings({"name": "fedavg"}, LONG, **private), tmp_path / "whole")
    with monkeypatch.context() as patch:
        calls = interrupt(patch, None)
        assert_same(extend(Path(shutil.copytree(short, tmp_path / "counted"))), whole)
    written = [call for call in calls if "part" not in call]
    assert [call.partition(" ")[2] for call in written].count(file_names.EXTENSION) == 1
    first = calls.index("append rows.jsonl")  # from there on, the extension is a run like any other
    assert first > 10
    committed = 0
    for at in range(first + 1):
        folder = Path(shutil.copytree(short, tmp_path / str(at)))
        with monkeypatch.context() as patch:
            interrupt(patch, at)
            with pytest.raises(Killed):
                extend(folder)
        code, out, err = Shell(monkeypatch, capsys)("resume", folder)
        assert code == 0, err
        if "is finished" in out:
            assert not committed, "once the extension is written, it is not lost"
            assert_same_folder(folder, short)
            extend(folder)
        else:
            committed += 1
        assert_same(folder, whole)
        assert run_folder.verify(folder)
        assert not (folder / file_names.EXTENSION).exists()
    assert committed > 5


def assert_same_folder(folder: Path, other: Path) -> None:
    """Equal files, apart from the temporary file of a write that was interrupted."""
    one, two = ({name: data for name, data in contents(each).items() if "part" not in name} for each in (folder, other))
    assert one == two


def test_pending_extension_is_named_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = play(settings({"name": "fedavg"}, SHORT), tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "_apply", lambda folder: (_ for _ in ()).throw(DiskError("full")))
        with pytest.raises(DiskError):
            extend(folder)
    with pytest.raises(run_folder.RunFolderError, match="was interrupted; complete it with 'partita resume"):
        run_folder.verify(folder)
    path = folder / file_names.EXTENSION
    whole = path.read_text()
    for damaged in (
        whole.replace("rounds = 4", "rounds = 5"), whole.replace("environment", "environments"), "[]", '{"files": {}}',
        json.dumps({"files": {"../x": ""}, "digest": atomic_files.digest(run_folder.to_json({"../x": ""}))}),
    ):  # fmt: skip
        path.write_text(damaged)
        with pytest.raises(DamageError, match=r"extension\.json is"):
            run_folder.complete_extension(folder)
        assert (folder / file_names.RESULT).exists()
    path.write_text(whole)
    run_folder.complete_extension(folder)
    assert load(folder / file_names.CONFIG).rounds == LONG
    assert not (folder / file_names.RESULT).exists()
    assert builder.build(load(folder / file_names.CONFIG)).run.rounds == LONG
