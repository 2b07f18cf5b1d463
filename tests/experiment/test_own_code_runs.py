"""Runs with the user's own method, data, split, metrics and tracker: recorded, resumed, reported and refused."""

from __future__ import annotations

import io
import json
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from own_code_fixtures import CONFIG, MINE, write_own_code
from shell import Shell

import partita
from partita.core.own_code import CodeError, digest
from partita.experiment import flower_app, run_folder
from partita.experiment.builder import build
from partita.experiment.config import load, load_recorded, parse, shared_digest
from partita.experiment.runner import resume, start
from partita.experiment.tracking import metrics_of
from partita.experiment.trusted_code import trusted_file
from partita.track.scalars import scalars

SIDE_EFFECT = "from pathlib import Path\nPath(__file__).with_name('was_run').touch()\n"


@pytest.fixture(autouse=True)
def nothing_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def run_all(config: Path, folder: Path) -> Path:
    list(start(load(config), folder))
    return folder


def test_run_records_its_code_and_resumes_without_the_original(tmp_path: Path) -> None:
    config = write_own_code(tmp_path / "lab")
    whole = run_all(config, tmp_path / "whole")
    recorded = tomllib.loads((whole / "config.toml").read_text())
    assert recorded["method"]["name"] == "code/mine.py:half"
    assert recorded["split"]["name"] == "code/mine.py:in_turn"
    assert recorded["evaluate"]["metrics"] == ["code/mine.py:top2", "code/mine.py:wrong"]
    assert recorded["label"] == "half(share=0.75)"
    assert recorded["code"] == {"mine.py": digest(MINE.encode())}
    assert (whole / "code" / "mine.py").read_text() == MINE
    assert (whole / "tracked.txt").read_text() == "".join(f"half(share=0.75) {round}\n" for round in range(3))
    rows = list(run_folder.read_rows(whole))
    assert rows[-1]["cohort"] == ["site-0", "site-1"]
    assert rows[-1]["test"]["wrong"] == round(40 * (1 - rows[-1]["test"]["accuracy"]))
    assert rows[-1]["test"]["top2"] >= rows[-1]["test"]["accuracy"]

    rounds = start(load(config), tmp_path / "stopped")
    next(rounds)
    rounds.close()
    shutil.rmtree(tmp_path / "lab")
    list(resume(load_recorded(tmp_path / "stopped"), tmp_path / "stopped"))
    ends = [run_folder.finished(folder) for folder in (whole, tmp_path / "stopped")]
    assert None not in ends
    assert ends[0]["digest"] == ends[1]["digest"]


def test_file_is_relative_to_the_config_and_an_override_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_own_code(tmp_path / "lab")
    write_own_code(tmp_path / "here", code=MINE.replace('"half"', '"other"'))
    monkeypatch.chdir(tmp_path / "here")
    assert load(config).method["name"] == f"{tmp_path}/lab/mine.py:half"
    (tmp_path / "here" / "here.py").write_text(MINE)
    assert load(config, ["method.name=here.py:half"]).method["name"] == f"{tmp_path}/here/here.py:half"
    assert parse({"method": {"name": "mine.py:half"}}).method["name"] == f"{tmp_path}/here/mine.py:half"


def test_two_files_of_one_name_are_refused_in_one_config(tmp_path: Path) -> None:
    config = write_own_code(tmp_path / "lab")
    write_own_code(tmp_path / "other")
    with pytest.raises(CodeError, match="have the same name"):
        load(config, [f"data.name={tmp_path}/other/mine.py:stripes"])


@pytest.mark.slow
def test_changed_copy_is_an_error(tmp_path: Path, run_partita: Shell) -> None:
    folder = run_all(write_own_code(tmp_path / "lab"), tmp_path / "run")
    (folder / "code" / "mine.py").write_text(MINE.replace("0.3", "0.4"))
    (folder / "result.json").unlink()
    code, _, errors = run_partita("resume", folder)
    assert code == 1
    assert "code/mine.py does not match its digest in checksums.json" in errors
    with pytest.raises(CodeError, match=r"code/mine\.py has changed; restore it, or start a new run"):
        load_recorded(folder, trust_code=True)


@pytest.mark.slow
def test_changed_original_cannot_continue_a_run(tmp_path: Path, run_partita: Shell) -> None:
    config = write_own_code(tmp_path / "lab")
    folder = run_all(config, tmp_path / "run")
    write_own_code(tmp_path / "lab", code=MINE.replace("0.3", "0.4"))
    code, _, errors = run_partita("run", "-c", config, "--out", folder, "--resume")
    assert code == 1
    assert "holds another run: code/mine.py has changed since the run was started; replace it with" in errors


def test_code_that_changes_between_reading_and_building_is_an_error(tmp_path: Path) -> None:
    config = load(write_own_code(tmp_path / "lab"))
    write_own_code(tmp_path / "lab", code=MINE.replace("0.3", "0.4"))
    with pytest.raises(CodeError, match=r"code/mine\.py has changed"):
        build(config)


@pytest.mark.slow
@pytest.mark.parametrize("listed", [True, False])
def test_code_of_a_stranger_is_not_run(
    tmp_path: Path, run_partita: Shell, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    """The folder is consistent in itself: an attacker writes the checksums too."""
    code = SIDE_EFFECT + MINE.replace("from __future__ import annotations\n", "")
    folder = run_all(write_own_code(tmp_path / "lab", code=code), tmp_path / "run")
    if not listed:  # the attacker leaves out the table
        text = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(text.partition("\n[code]")[0])
        names = json.loads((folder / "checksums.json").read_text())
        run_folder.write_checksums(folder, names)
    (folder / "code" / "was_run").unlink(missing_ok=True)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    finished = (folder / "result.json").read_bytes()
    for command in ("resume", "audit"):
        if command == "resume":
            (folder / "result.json").unlink()
        code_of_exit, _, errors = run_partita(command, folder)
        (folder / "result.json").write_bytes(finished)
        assert code_of_exit == 1
        assert "the run uses code/mine.py, which you have not run or trusted on this machine; read it" in errors
    assert run_partita("report", folder)[0] == 0
    assert run_partita("ls", tmp_path)[0] == 0
    assert partita.load_run(folder).scores
    with pytest.raises(CodeError, match="not run or trusted"):
        partita.load_run(folder).functional()
    assert not (folder / "code" / "was_run").exists()
    if not listed:
        return  # it was changed, so nobody can continue it
    model, params = partita.load_run(folder).functional(trust_code=True)
    assert params.keys() == model.initial.keys()
    assert (folder / "code" / "was_run").exists()


def test_module_of_a_stranger_is_not_imported(tmp_path: Path) -> None:
    folder = run_all(write_own_code(tmp_path / "lab"), tmp_path / "run")
    text = (folder / "config.toml").read_text().replace("code/mine.py:half", "this:half")
    (folder / "config.toml").write_text(text)
    with pytest.raises(CodeError, match="the run uses this:half, which you have not run or trusted"):
        load_recorded(folder)


def with_side_effect(folder: Path) -> Path:
    return write_own_code(folder, code=SIDE_EFFECT + MINE.replace("from __future__ import annotations\n", ""))


LOOKS = [
    ("config",),
    ("plan",),
    ("split",),
    ("budget", "--epsilon", "8"),
    ("budget", "--statement"),
]


@pytest.mark.parametrize("command", LOOKS, ids=" ".join)
def test_looking_at_a_config_does_not_run_its_code(
    tmp_path: Path, run_partita: Shell, command: tuple[str, ...]
) -> None:
    config = with_side_effect(tmp_path)
    code, out, errors = run_partita(command[0], "-c", config, *command[1:])
    file = tmp_path / "mine.py"
    assert (code, out) == (1, "")
    assert f"the config runs {file} (digest {digest(file.read_bytes())}), which you have not run" in errors
    assert "read it, then repeat the command with --trust-code" in errors
    assert not (tmp_path / "was_run").exists()
    config.write_text(config.read_text().replace("mine.py:half", "this:half"))  # a module runs when it is imported
    assert "this:half" in run_partita(command[0], "-c", config, *command[1:])[2]
    assert "this" not in sys.modules


def test_trusted_code_is_remembered_until_it_changes(tmp_path: Path, run_partita: Shell) -> None:
    config = with_side_effect(tmp_path)
    assert run_partita("config", "-c", config, "--trust-code")[0] == 0
    assert (tmp_path / "was_run").exists()
    assert run_partita("config", "-c", config)[0] == 0
    with (tmp_path / "mine.py").open("a") as file:
        file.write("CHANGED = 1\n")
    assert "read it, then repeat" in run_partita("config", "-c", config)[2]


def test_code_that_a_user_names_or_has_written_needs_no_trust(tmp_path: Path, run_partita: Shell) -> None:
    named = f'method={{name="{with_side_effect(tmp_path).parent}/mine.py:half"}}'
    (tmp_path / "plain.toml").write_text('[data]\nname = "digits"\n[model]\nname = "vit"\n')
    assert run_partita("config", "-c", tmp_path / "plain.toml", "--set", named)[0] == 0
    assert run_partita("new", "method", "fedmine", "--to", tmp_path)[0] == 0
    assert run_partita("config", "-c", tmp_path / "fedmine.toml")[0] == 0


@pytest.mark.parametrize("answer", ["y", "n"])
def test_person_on_a_terminal_is_asked_about_code(
    tmp_path: Path, run_partita: Shell, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    config = with_side_effect(tmp_path)
    terminal = io.StringIO(f"{answer}\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    code, _, errors = run_partita("config", "-c", config)
    assert ("which you do not trust" in errors) == (code == 1) == (answer == "n")
    assert (tmp_path / "was_run").exists() == (answer == "y")


@pytest.mark.slow
def test_list_of_trusted_code_has_each_file_once(tmp_path: Path) -> None:
    config = write_own_code(tmp_path / "lab")
    for name in ("one", "two"):
        run_all(config, tmp_path / name)
    assert trusted_file().read_text() == f"{digest(MINE.encode())}\n"


@pytest.mark.slow
def test_run_goes_on_where_the_list_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert run_folder.finished(run_all(write_own_code(tmp_path / "lab"), tmp_path / "run"))


@pytest.mark.slow
def test_comparison_reads_methods_from_files_and_keeps_its_runs(
    tmp_path: Path, run_partita: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_own_code(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ("compare", "-c", config, "--methods", "fedavg,mine.py:half(share=0.25)", "--seeds", 1, "--json")
    words += ("--jobs", 1)
    code, out, _ = run_partita(*words, "--metric", "wrong")
    assert code == 0
    compared = json.loads(out)
    assert [line["label"] for line in compared["lines"]] == ["fedavg", "half(share=0.25)"]
    assert (compared["metric"], compared["higher_is_better"]) == ("wrong", False)
    assert run_partita(*words)[0] == 0  # all runs are there
    code, _, errors = run_partita(*words, "--metric", "wrongs")
    assert code == 1
    assert "did you mean 'wrong'?" in errors


@pytest.mark.slow
def test_overwrite_removes_the_copies(tmp_path: Path) -> None:
    config = write_own_code(tmp_path / "lab")
    folder = run_all(config, tmp_path / "run")
    list(start(load(config, ["method={}", 'method={name="fedavg"}', *WITHOUT_OWN_CODE]), folder, overwrite=True))
    assert not (folder / "code").exists()
    assert "code" not in tomllib.loads((folder / "config.toml").read_text())


WITHOUT_OWN_CODE = (
    'split={name="iid", clients=2}',
    "data.name=synthetic",
    "evaluate.metrics=[]",
    "track.to=[]",
    "rounds=1",
)


@pytest.mark.slow
def test_options_of_own_functions_are_checked_and_explained(tmp_path: Path, run_partita: Shell) -> None:
    config = write_own_code(tmp_path)
    line = MINE[: MINE.index("logits.topk")].count("\n") + 1
    for change, message in (
        ("method.shar=0.5", "unknown key 'method.shar'; did you mean 'share'?"),
        ("method.share=2", "method.share is 2; it must be a number above 0 and up to 1"),
        ("data.example=3", "unknown key 'data.example'; did you mean 'examples'?"),
        ("split.sites=0", "split.sites is 0; it must be a whole number from 1 to"),
        (f"evaluate.metrics=['{tmp_path}/mine.py:top3']", "has no function 'top3'; did you mean 'top2'?"),
        (f"track.to=['{tmp_path}/mine.py:top2']", f"mine.py:top2' failed: line {line}: AttributeError"),
        (f"method.name={tmp_path}/mine.py:stripes", "unknown key 'method.share'; it can be: key, examples"),
    ):
        code, _, errors = run_partita("run", "-c", config, "--out", tmp_path / "run", "--set", change)
        assert (code, errors.count("\n")) == (1, 1), errors
        assert message in errors
    code, out, _ = run_partita("options", f"method.{tmp_path}/mine.py:half")
    assert code == 0
    assert "share: a number above 0 and up to 1; default 0.5" in out
    assert "how far the server moves" in out


def test_own_sampling_rule_draws_the_cohorts(tmp_path: Path) -> None:
    config = write_own_code(tmp_path / "lab")
    own = [f"sampling.name={tmp_path}/lab/mine.py:take_turns", "federation.cohort=1"]
    list(start(load(config, own), tmp_path / "run"))
    assert [row["cohort"] for row in run_folder.read_rows(tmp_path / "run")] == [["site-0"], ["site-1"], ["site-0"]]
    private = [*own, 'method={name="fedavg"}', 'privacy={unit="client", clip=1.0, noise=1.0, delta=1e-3}']
    with pytest.raises(
        ValueError, match=r"is '.*take_turns' and .* does not draw all clients with the same probability"
    ):
        build(load(config, private))


@pytest.mark.slow
def test_wrong_splits_are_refused(tmp_path: Path) -> None:
    for rows, message in (
        ("{'a': []}", "gives the client 'a' no rows"),
        ("{'a': [0, 120]}", "gives 'a' a row outside of the 120 train rows"),
        ("{'a': [-1]}", "outside"),
        ("{'a': [0, 0]}", "gives a row of 'a' twice"),
        ("{'a': [0], 'b': [0]}", "gives a row of 'b' twice"),
        ("[0, 1]", "returned a list; it must return a Partition or Mapping"),
    ):
        code = MINE + f"\n\ndef wrong_split(task, key):\n    return {rows}\n"
        config = write_own_code(tmp_path, code=code, config=CONFIG.replace("in_turn", "wrong_split"))
        with pytest.raises(ValueError, match=message):
            build(load(config, ["split={}", f"split.name={tmp_path}/mine.py:wrong_split"]))


@pytest.mark.slow
def test_failing_tracker_warns_and_the_run_goes_on(tmp_path: Path) -> None:
    config = write_own_code(
        tmp_path, code=MINE.replace("with (folder", "raise OSError('no network')\n        with (folder")
    )
    with pytest.warns(UserWarning, match=r"the tracker '.*mine.py:log' failed in round \d: OSError: no network"):
        folder = run_all(config, tmp_path / "run")
    assert run_folder.finished(folder)


@pytest.mark.slow
def test_direction_of_own_metrics_reaches_the_report(tmp_path: Path, run_partita: Shell) -> None:
    folder = run_all(write_own_code(tmp_path / "lab"), tmp_path / "run")
    code, out, _ = run_partita("report", folder)
    assert code == 0
    assert "top2, %" in out
    assert "wrong, %" not in out
    assert "lower is better for ece, loss, wrong" in " ".join(out.split())
    page = (folder / "report.html").read_text()
    assert "code/mine.py" in page
    assert "class PartOfTheWay" in page


def test_sites_must_agree_on_shared_code_and_may_have_their_own_data_code(tmp_path: Path) -> None:
    config = write_own_code(tmp_path / "lab")
    write_own_code(tmp_path / "other", code=MINE.replace("0.3", "0.4"))
    assert shared_digest(load(config)) != shared_digest(load(tmp_path / "other" / "own.toml"))
    (tmp_path / "other" / "local.py").write_text(MINE.replace("0.3", "0.4"))
    own_data = load(config, [f"data.name={tmp_path}/other/local.py:stripes"])
    assert shared_digest(load(config)) == shared_digest(own_data)
    assert shared_digest(load(config)) == shared_digest(load(config, ["track.to=[]"]))


def test_flower_app_holds_the_code(tmp_path: Path) -> None:
    config = write_own_code(tmp_path / "lab")
    app = flower_app.init(tmp_path / "app", config)
    shutil.rmtree(tmp_path / "lab")
    assert (app / "federation" / "code" / "mine.py").read_text() == MINE
    assert list(flower_app.population(app)) == ["site-0", "site-1"]
    assert "partita.models.vit" in flower_app.modules(app)


@pytest.mark.slow
def test_python_runs_and_reads_runs(tmp_path: Path) -> None:
    config = write_own_code(tmp_path / "lab")
    done = partita.run(config, tmp_path / "runs" / "one")
    assert done.finished
    assert len(done.rows) == 3
    assert done.config["method"]["share"] == 0.75
    assert done.scores == done.rows[-1]["test"]
    assert done.personal_scores["accuracy"].keys() == {"site-0", "site-1"}
    assert {row["name"] for row in done.plan[0]["rows"]} == done.functional()[1].keys()
    again = partita.run(str(config), tmp_path / "runs" / "one", resume=True)
    assert again.scores == done.scores
    other = partita.run(
        parse(tomllib.loads(config.read_text().replace('"mine.py', f'"{tmp_path}/lab/mine.py'))),
        done.folder,
        overwrite=True,
    )
    assert other.scores == done.scores
    with pytest.raises(ValueError, match="choose one"):
        partita.run(config, done.folder, resume=True, overwrite=True)
    with pytest.raises(run_folder.RunFolderError, match="already holds a finished run"):
        partita.run(config, done.folder)
    model, params = done.functional()
    scores = partita.score(model, params, build(load(config)).federation.test)
    assert scores["accuracy"] == done.scores["accuracy"]


@pytest.mark.slow
def test_frame_has_a_row_for_each_round(tmp_path: Path) -> None:
    config = write_own_code(tmp_path / "lab")
    for seed in (0, 1):
        partita.run(load(config, [f"seed={seed}"]), tmp_path / "runs" / f"seed-{seed}")
    frame = partita.to_frame(tmp_path / "runs")
    assert frame["round"].tolist() == [0, 1, 2] * 2
    assert frame["seed"].tolist() == [0] * 3 + [1] * 3
    assert set(frame["label"]) == {"half(share=0.75)"}
    last = partita.load_run(tmp_path / "runs" / "seed-1").frame.iloc[-1]
    row = partita.load_run(tmp_path / "runs" / "seed-1").rows[-1]
    assert last["test.wrong"] == row["test"]["wrong"]
    assert last["bytes.up"] == row["bytes"]["up"]
    assert last["personal.accuracy.mean"] == pytest.approx(sum(row["personal"]["accuracy"].values()) / 2)
    assert (last["clients.sampled"], last["clients.lost"]) == (2, 0)
    sent = scalars(row, metrics_of(tmp_path / "runs" / "seed-1"))
    assert {name.replace("/", ".") for name in sent} <= set(frame.columns)


@pytest.mark.slow
def test_model_of_a_client_has_what_it_keeps(tmp_path: Path) -> None:
    config = write_own_code(tmp_path / "lab")
    done = partita.run(load(config, ["method={}", "method.name=fedper"]), tmp_path / "run")
    shared, own, other = (done.functional(client)[1] for client in (None, "site-0", "site-1"))
    heads = [name for name in shared if not own[name].equal(other[name])]
    assert heads
    assert all(own[name].equal(shared[name]) for name in shared if name not in heads)
    with pytest.raises(ValueError, match="has no client 'site-9'"):
        done.functional("site-9")
