"""Resuming a run with a damaged file gives the result of the uninterrupted run, or names the file."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import SMALL_TASK, SMALL_VIT
from shell import Shell

from partita.core.rng import Key
from partita.experiment import run_folder
from partita.experiment.config import Config, load, parse
from partita.experiment.runner import resume, start
from partita.record import file_names
from partita.storage import atomic_files
from partita.storage.atomic_files import DamageError, DiskError, LinkError, list_checksummed

ROUNDS = 4


def settings(method: str = "fedper", seed: int = 0, rounds: int = ROUNDS) -> Config:
    raw = tomllib.loads(SMALL_VIT + SMALL_TASK)
    raw |= {
        "method": {"name": method},
        "seed": seed,
        "rounds": rounds,
        "engine": {"client_state": "disk", "clients_per_block": 1},
    }
    raw |= {"privacy": {"noise": 2.0, "accountant": "rdp"}, "federation": {"cohort": 2}}
    return parse({**raw, "split": {"name": "iid", "clients": 3}})


def finish_run(config: Config, folder: Path) -> str:
    """Start or resume the run, and return the digest of its result."""
    begun = (folder / file_names.CONFIG).exists()
    for _ in resume(load(folder / file_names.CONFIG), folder) if begun else start(config, folder):
        pass
    return result_digest(folder)


def result_digest(folder: Path) -> str:
    found: str = json.loads((folder / file_names.RESULT).read_text())["digest"]
    return found


def assert_same(folder: Path, whole: Path) -> None:
    """Equal result tensors and rows, except for times."""
    assert result_digest(folder) == result_digest(whole)
    one, two = ([{**row, "seconds": 0} for row in run_folder.read_rows(each)] for each in (folder, whole))
    assert one == two


def half_done_run(config: Config, folder: Path) -> Path:
    rows = start(config, folder)
    for _ in range(ROUNDS - 1):
        next(rows)
    rows.close()  # type: ignore[attr-defined]
    return folder


@pytest.fixture(scope="module", autouse=True)
def fixed_secret() -> Iterator[None]:
    """All private runs draw from the same secret, so that they can be compared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("partita.experiment.builder.draw", lambda: Key(77))
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    finish_run(settings(), root / "whole")
    others = {"seed": settings(seed=1), "method": settings("fedrep")}
    made = {name: half_done_run(config, root / name) for name, config in others.items()}
    return {"whole": root / "whole", "half": half_done_run(settings(), root / "half"), **made}


# Kind of file -> its path in a run folder.
KINDS: dict[str, Callable[[Path], Path]] = {
    **{
        name: lambda folder, name=name: folder / name  # type: ignore[misc]
        for name in ("config.toml", "environment.json", "plan.json", "privacy.json", "checksums.json", "rows.jsonl")
    },
    "private/secret": lambda folder: folder / "private" / "secret",
    ".lock": lambda folder: folder / ".lock",
    "newest checkpoint": lambda folder: list_checksummed(folder / "checkpoints")[-1],
    "older checkpoint": lambda folder: list_checksummed(folder / "checkpoints")[0],
    **{
        f"newest state of c{number}": lambda folder, number=number: list_checksummed(folder / "clients" / f"c{number}")[
            -1
        ]  # type: ignore[misc]
        for number in range(2)
    },
    "older state": lambda folder: max((folder / "clients").iterdir(), key=lambda path: len(list_checksummed(path))),
}


def flip(data: bytes, share: float) -> bytes:
    place = min(int(len(data) * share), len(data) - 1)
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :] if data else data


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    **{f"flip at {share:.0%}": lambda data, share=share: flip(data, share) for share in (0.2, 0.5, 1)},  # type: ignore[misc]
    "cut": lambda data: data[: len(data) // 2],
    "zero": lambda data: bytes(len(data)),
    "empty": lambda data: b"",
}


def check(folder: Path, path: Path, whole: Path, shell: Callable[[Path], tuple[int, str]]) -> None:
    code, err = shell(folder)
    if code == 0:
        assert_same(folder, whole)
    else:
        assert path.name in err, err
        # The error and how to go on; before them, a private run says where its secret is.
        assert len([line for line in err.strip().splitlines() if "this run's secret" not in line]) <= 2, err


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Path], tuple[int, str]]:
    def run(folder: Path) -> tuple[int, str]:
        code, _, err = Shell(monkeypatch, capsys)("resume", folder)
        return code, err

    return run


def oldest_file(path: Path) -> Path:
    return list_checksummed(path)[0] if path.is_dir() else path


FAST_CASES = {
    ("config.toml", "flip at 50%"), ("plan.json", "cut"), ("privacy.json", "flip at 20%"), ("checksums.json", "empty"),
    ("checksums.json", "flip at 50%"), ("rows.jsonl", "flip at 20%"), ("rows.jsonl", "cut"), ("rows.jsonl", "delete"),
    (".lock", "delete"), ("newest checkpoint", "zero"), ("newest checkpoint", "delete"), ("older checkpoint", "empty"),
    ("environment.json", "zero"), ("newest state of c0", "flip at 50%"), ("newest state of c1", "delete"),
    ("config.toml", "delete"), ("older state", "delete"),
}  # fmt: skip


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        pytest.param(kind, damage, marks=() if (kind, damage) in FAST_CASES else pytest.mark.slow)
        for kind in KINDS
        for damage in [*DAMAGE, "delete"]
    ],
)
def test_damaged_file_is_named_or_does_not_change_the_result(
    kind: str, damage: str, runs: dict[str, Path], tmp_path: Path, shell: Callable[[Path], tuple[int, str]]
) -> None:
    folder = Path(shutil.copytree(runs["half"], tmp_path / "run"))
    path = oldest_file(KINDS[kind](folder))
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes(DAMAGE[damage](path.read_bytes()))
    check(folder, path, runs["whole"], shell)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("kind", "keeps_name", "other"),
    [
        *((kind, True, "seed") for kind in KINDS if kind != ".lock"),
        *(
            (kind, keeps, "method")
            for kind in KINDS
            if "state" in kind or "checkpoint" in kind
            for keeps in (True, False)
        ),
        *((kind, False, "seed") for kind in KINDS if "state" in kind or "checkpoint" in kind),
    ],
)
def test_file_of_another_run_is_named_or_does_not_change_the_result(
    kind: str, keeps_name: bool, other: str, runs: dict[str, Path], tmp_path: Path,
    shell: Callable[[Path], tuple[int, str]],
) -> None:  # fmt: skip
    folder = Path(shutil.copytree(runs["half"], tmp_path / "run"))
    path, strange = oldest_file(KINDS[kind](folder)), oldest_file(KINDS[kind](runs[other]))
    path.unlink()
    put = path if keeps_name else path.with_name(strange.name)
    shutil.copy(strange, put)
    code, err = shell(folder)
    if code == 0:
        assert_same(folder, runs["whole"])
    else:
        assert path.name in err or put.name in err, err


@pytest.mark.slow
def test_damaged_split_is_named_on_resume(tmp_path: Path) -> None:
    """Private runs record no split, so this is a run without privacy."""
    half = half_done_run(replace(settings("fedavg"), privacy=None), tmp_path / "half")
    for kind, damage in DAMAGE.items():
        folder = Path(shutil.copytree(half, tmp_path / kind))
        path = folder / file_names.SPLIT
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(DamageError, match=re.escape(str(path))):
            next(resume(load(folder / file_names.CONFIG), folder))
    (half / file_names.SPLIT).unlink()
    with pytest.raises(DamageError, match=r"split\.json is missing"):
        next(resume(load(half / file_names.CONFIG), half))


@pytest.mark.slow
def test_run_of_an_earlier_version_without_a_split_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(settings("fedavg"), privacy=None)
    finish_run(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr("partita.experiment.runner.describe_split", lambda federation: None)
        old = half_done_run(config, tmp_path / "old")
    finish_run(config, old)
    assert not (old / file_names.SPLIT).exists()
    assert_same(old, tmp_path / "whole")


@pytest.mark.slow
def test_missing_client_state_is_refused_on_resume(runs: dict[str, Path], tmp_path: Path) -> None:
    for client in ("c0", "c1", "c2"):
        folder = Path(shutil.copytree(runs["half"], tmp_path / client))
        path = list_checksummed(folder / file_names.CLIENTS / client)[-1]
        path.unlink()
        with pytest.raises(DamageError, match=f"{path.name} is missing: it is the state of client '{client}'"):
            next(resume(load(folder / file_names.CONFIG), folder))


@pytest.mark.slow
def test_states_not_named_by_a_checkpoint_are_ignored_on_resume(
    runs: dict[str, Path], tmp_path: Path, shell: Callable[[Path], tuple[int, str]]
) -> None:
    folder = Path(shutil.copytree(runs["half"], tmp_path / "run"))
    for client in (folder / "clients").iterdir():
        for strange in list_checksummed(runs["seed"] / "clients" / client.name):
            shutil.copy(strange, client / strange.name)
    assert shell(folder)[0] == 0
    assert result_digest(folder) == result_digest(runs["whole"])


@pytest.mark.slow
def test_run_killed_during_preparation_can_be_finished(runs: dict[str, Path], tmp_path: Path) -> None:
    names = ["config.toml", "environment.json", "plan.json", "privacy.json", "checksums.json"]
    for count in (1, 3, 5):
        folder = tmp_path / str(count)
        shutil.copytree(runs["half"] / "private", folder / "private")
        for name in names[:count]:
            shutil.copy(runs["half"] / name, folder / name)
        assert finish_run(settings(), folder) == result_digest(runs["whole"])
        assert run_folder.verify(folder)


def test_run_folder_without_its_config_is_not_treated_as_new(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs["half"], tmp_path / "run"))
    (folder / file_names.CONFIG).unlink()
    with pytest.raises(run_folder.RunFolderError, match="already holds a part of a run"):
        next(start(settings(), folder))


def test_checksum_paths_outside_the_run_folder_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs["half"], tmp_path / "run"))
    for name in ("../half/config.toml", "/etc/passwd", "checkpoints/../../x"):
        listed = json.loads((runs["half"] / file_names.CHECKSUMS).read_text())
        (folder / file_names.CHECKSUMS).write_text(json.dumps({**listed, name: "0" * 32}))
        with pytest.raises(DamageError, match="outside the run folder"):
            run_folder.verify(folder)


LINKS = ["rows.jsonl", "config.toml", "checkpoints", "clients", "clients/c0", ".lock", "plan.json", "notes.txt"]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", LINKS)
def test_resume_refuses_symlinks_in_the_run_folder(
    name: str, runs: dict[str, Path], tmp_path: Path, shell: Callable[[Path], tuple[int, str]]
) -> None:
    folder, elsewhere = Path(shutil.copytree(runs["half"], tmp_path / "run")), tmp_path / "elsewhere"
    path = folder / name
    if path.exists():
        path.rename(elsewhere)
    else:
        elsewhere.write_text("mine")
    path.symlink_to(elsewhere)
    before = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    code, err = shell(folder)
    assert code == 1
    assert f"{path} is a symbolic link" in err
    assert {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()} == before


def test_writes_do_not_follow_symlinks_or_pipes(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "clients").symlink_to(tmp_path / "elsewhere")
    with pytest.raises((LinkError, run_folder.RunFolderError)):
        next(start(settings(), tmp_path / "run"))
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / f".x.{os.getpid()}.part").symlink_to(target)
    (tmp_path / "x").symlink_to(target)
    atomic_files.write(tmp_path / "x", b"new")
    assert (target.read_text(), (tmp_path / "x").read_text()) == ("mine", "new")
    (tmp_path / "y").symlink_to(target)
    with pytest.raises(LinkError, match="y is a symbolic link"):
        atomic_files.append(tmp_path / "y", b"new")
    os.mkfifo(tmp_path / "pipe")
    for open_pipe in (atomic_files.read, lambda path: atomic_files.append(path, b"x")):
        with pytest.raises(LinkError, match="pipe is not a regular file"):
            open_pipe(tmp_path / "pipe")


# ---- a full disk


def count_writes(monkeypatch: pytest.MonkeyPatch, fail_at: int | None) -> Iterator[int]:
    """Count fsync calls, and fail at one of them as a full disk does."""
    calls = 0
    real = os.fsync

    def full(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls - 1 == fail_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        yield 0
    yield calls


def run_on_full_disk(config: Config, folder: Path, fail_at: int | None, monkeypatch: pytest.MonkeyPatch) -> int:
    counting = count_writes(monkeypatch, fail_at)
    next(counting)
    if fail_at is None:
        finish_run(config, folder)
    else:
        with pytest.raises(DiskError, match=r"cannot write .*No space left on device") as caught:
            finish_run(config, folder)
        # The secret is written first. Without it there is nothing to resume yet.
        assert ("then resume the run" in str(caught.value)) == ("private" not in str(caught.value))
    return next(counting)


@pytest.mark.slow
def test_full_disk_at_any_write_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every second write, so that all kinds of files are met in one round or the other."""
    config = settings(rounds=2)
    count = run_on_full_disk(config, tmp_path / "whole", None, monkeypatch)
    assert count > 20
    for call in range(1, count, 2):
        folder = tmp_path / str(call)
        run_on_full_disk(config, folder, call, monkeypatch)
        assert not list(folder.rglob("*.part"))
        assert finish_run(config, folder) == result_digest(tmp_path / "whole"), f"after write {call}"
