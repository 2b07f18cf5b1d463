"""`--overwrite` deletes the files of a run and nothing else, and `--resume` continues only the same run."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import SMALL_VIT

from partita.experiment import run_folder, runner
from partita.experiment.config import Config, load
from partita.experiment.run_folder import RunFolderError
from partita.experiment.runner import resume, start, start_or_resume

TEXT = (
    """
rounds = 2
[method]
name = "scaffold"
[training]
optimizer = "sgd"
[data]
name = "synthetic"
examples = 40
test_examples = 10
size = 4
[split]
name = "iid"
clients = 2
"""
    + SMALL_VIT
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "e.toml").write_text(TEXT)
    return load(tmp_path / "e.toml")


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_overwriting_deletes_only_what_a_run_wrote(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    list(start(config, folder))
    for name in ("report.html", "audit.json", "samples.json", "checkpoints/.000009-ab.safetensors.77.part"):
        (folder / name).write_text("by partita")
    (folder / "track" / "mlflow" / "artifacts").mkdir(parents=True)
    (folder / "track" / "mlflow" / "artifacts" / "clients.json").write_text("by partita")
    own = {"notes.txt", "track/notes.txt", "clients/notes.txt", "checkpoints2/000001-x.safetensors", "private/key"}
    for name in own:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    with run_folder.lock(folder):
        run_folder.remove_run(folder)
    assert files(folder) == {*own, ".lock"}
    assert not (folder / "checkpoints").exists()
    rows = list(start(replace(config, rounds=1), folder))
    assert len(rows) == 1
    assert own < files(folder)


@pytest.mark.slow
def test_overwriting_replaces_a_run_only_when_the_new_one_is_ready(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    list(start(config, folder))
    before = files(folder)
    bad = replace(config, split={**config.split, "clients": 500})
    with pytest.raises(ValueError, match="500 clients"):
        list(start(bad, folder, overwrite=True))
    assert files(folder) == before
    with run_folder.lock(folder), pytest.raises(RunFolderError, match="in use by another process"):
        list(start(config, folder, overwrite=True))
    assert run_folder.finished(folder)
    assert len(list(start(replace(config, rounds=1), folder, overwrite=True))) == 1
    assert load(folder / "config.toml").rounds == 1


def test_a_crash_while_overwriting_leaves_a_folder_that_can_be_overwritten(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(Exception):
        pass

    folder, real = tmp_path / "run", Path.unlink
    monkeypatch.setattr(runner, "build", lambda *_: pytest.fail("not reached"))
    folder.mkdir()
    (folder / "config.toml").write_text(config.to_toml())
    names = ["result.json", "rows.jsonl", "plan.json", "environment.json", "checksums.json", ".lock"]
    names += ["checkpoints/000001-" + "0" * 32 + ".safetensors", "clients/c0/000001-" + "0" * 32 + ".safetensors"]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    for _ in range(20):
        calls: list[Path] = []

        def unlink(path: Path, missing_ok: bool = False, calls: list[Path] = calls) -> None:
            if path.exists():
                if calls:
                    raise Crash
                calls.append(path)
            real(path, missing_ok)

        monkeypatch.setattr(Path, "unlink", unlink)
        try:
            run_folder.remove_run(folder)
            break
        except Crash:
            run_folder.refuse_others(folder)
            assert run_folder.finished(folder) is None, "the result is the first to go"
    assert files(folder) == {".lock"}
    run_folder.refuse_run(folder)


@pytest.mark.parametrize(
    "content",
    [
        {"notes.txt": "mine"},
        {"config.toml": "x = 1"},
        {"config.toml": "not TOML", ".lock": ""},
        {"rows.jsonl": "", ".lock": ""},
        {"config.toml": None},
    ],
)
def test_a_folder_that_is_no_run_is_never_overwritten(
    content: dict[str, str | None], config: Config, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, text in content.items():
        (folder / name).write_text(config.to_toml() if text is None else text)  # a copied config, without a lock
    with pytest.raises(RunFolderError, match="is not a run folder"):
        list(start(config, folder, overwrite=True))
    assert files(folder) == content.keys()


def test_an_existing_run_is_described_with_the_options_that_fit(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    rows = start(config, folder)
    next(rows)
    rows.close()
    with pytest.raises(RunFolderError, match="an unfinished run with 1 of 2 rounds saved; continue it with --resume"):
        list(start(config, folder))
    assert len(list(start_or_resume(config, folder))) == 1
    assert list(start_or_resume(config, folder)) == []
    with pytest.raises(RunFolderError, match="holds a finished run; replace it with --overwrite, or choose another"):
        list(start(config, folder))
    (folder / "config.toml").unlink()
    (folder / "result.json").unlink()
    with pytest.raises(RunFolderError, match="already holds a part of a run; choose another folder"):
        list(start(config, folder))


def test_resume_option_starts_or_continues_only_the_same_run(config: Config, tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    list(start(config, whole))
    rows = start_or_resume(config, folder)
    next(rows)
    rows.close()
    training = replace(config.training, lr=0.5, epochs=2, batch_size=7)
    with pytest.raises(RunFolderError, match=r"holds another run: seed is 0 there and 3 here, .* \(and 1 more\)"):
        start_or_resume(replace(config, seed=3, training=training), folder)
    list(start_or_resume(replace(config, engine=replace(config.engine, threads=1)), folder))
    digests = [json.loads((path / "result.json").read_text())["digest"] for path in (whole, folder)]
    assert digests[0] == digests[1]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("settings", [{}, {"clients_per_block": 1}, {"workers": 2, "clients_per_block": 1}])
def test_replies_are_counted_as_they_arrive(settings: dict[str, int], config: Config, tmp_path: Path) -> None:
    if "workers" in settings and os.uname().sysname != "Linux":
        pytest.skip("workers need Linux")
    config = replace(config, engine=replace(config.engine, **settings))
    told: list[tuple[int, int]] = []
    rows = start(config, tmp_path / "run", on_reply=lambda *count: told.append(count))
    next(rows)
    rows.close()
    assert told == [(0, 2), (1, 2), (2, 2)]
    told.clear()
    list(resume(load(tmp_path / "run" / "config.toml"), tmp_path / "run", on_reply=lambda *count: told.append(count)))
    assert told == [(0, 2), (1, 2), (2, 2)]
