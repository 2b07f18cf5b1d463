"""The secret of a private run: created, protected, required to resume, and stored nowhere else."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
import torch
from helpers import max_difference

from partita import report
from partita.core.dp_settings import PrivacyError
from partita.core.rng import Key
from partita.experiment.builder import build
from partita.experiment.compare import compare_all, expand
from partita.experiment.config import parse
from partita.experiment.recorded_model import load_recorded_model
from partita.experiment.runner import resume, start
from partita.privacy import secret
from partita.storage.atomic_files import DamageError, DiskError

CONFIG = {
    "rounds": 2,
    "method": {"name": "fedavg"},
    "data": {"name": "synthetic", "size": 4, "examples": 60, "test_examples": 20},
    "split": {"name": "iid", "clients": 3},
    "model": {"name": "vit", "width": 8, "layers": 1, "heads": 1, "patch": 2},
    "training": {"optimizer": "sgd", "lr": 0.1, "batch_size": 8, "steps": 2},
    "privacy": {"noise": 1.0},
}
REPEATABLE = {**CONFIG, "privacy": {"noise": 1.0, "repeatable": True}}


def digest_of_run(config: dict[str, object], folder: Path) -> str:
    for _ in start(parse(config), folder):
        pass
    return str(json.loads((folder / "result.json").read_text())["digest"])


@pytest.mark.slow
def test_private_run_creates_a_secret_readable_only_by_its_owner(tmp_path: Path) -> None:
    first, second = (digest_of_run(CONFIG, tmp_path / name) for name in ("a", "b"))
    assert first != second, "the same config and seed draw different noise"
    path = tmp_path / "a" / secret.FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len(path.read_bytes()) == 32
    assert path.read_bytes() != (tmp_path / "b" / secret.FILE).read_bytes()


def test_secret_appears_in_no_other_file(tmp_path: Path) -> None:
    digest_of_run(CONFIG, tmp_path / "run")
    report.page([report.load_run(tmp_path / "run")], tmp_path / "run" / "report.html")
    words = (tmp_path / "run" / secret.FILE).read_bytes()
    forms = [words, words.hex().encode(), str(int.from_bytes(words, "big")).encode(), words[:12]]
    others = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != secret.FILE.name]
    assert len(others) > 6
    for path in others:
        assert not [form for form in forms if form in path.read_bytes()], path


def test_key_repr_does_not_show_its_root() -> None:
    assert "123456789" not in repr(Key(123456789) / "round" / 3)


@pytest.mark.slow
def test_resume_refuses_a_missing_or_changed_secret(tmp_path: Path) -> None:
    for name in ("run", "other"):
        rows = start(parse(CONFIG), tmp_path / name)
        next(rows)
        rows.close()
    path, words = tmp_path / "run" / secret.FILE, (tmp_path / "other" / secret.FILE).read_bytes()
    for damage in (words, b"cut short", bytes(32), b""):
        path.write_bytes(damage)
        with pytest.raises(DamageError, match=r"private/secret does not match its digest"):
            list(resume(parse(CONFIG), tmp_path / "run"))
    path.unlink()
    with pytest.raises(DamageError, match=r"private/secret is missing"):
        list(resume(parse(CONFIG), tmp_path / "run"))
    with pytest.raises(PrivacyError, match=r"cannot read .*private/secret .*restore it from a copy"):
        secret.load(tmp_path / "run")
    path.write_bytes(b"cut short")
    with pytest.raises(PrivacyError, match="holds 9 bytes and not 32"):
        secret.load(tmp_path / "run")


@pytest.mark.slow
def test_secret_of_a_finished_run_can_be_deleted(tmp_path: Path) -> None:
    """Then nobody can recompute the noise. The model can be read, and the run cannot be extended."""
    digest_of_run(CONFIG, tmp_path / "run")
    (tmp_path / "run" / secret.FILE).unlink()
    assert load_recorded_model(tmp_path / "run").saved.done == 2
    with pytest.raises(PrivacyError, match=r"cannot read .*private/secret .*restore it from a copy"):
        list(resume(parse({**CONFIG, "rounds": 3}), tmp_path / "run"))
    (tmp_path / "run" / secret.FILE).write_bytes(bytes(32))
    with pytest.raises(DamageError, match=r"private/secret does not match its digest"):
        load_recorded_model(tmp_path / "run")


@pytest.mark.slow
def test_resumed_run_draws_the_same_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.experiment.builder.draw", lambda: Key(77))
    whole = digest_of_run(CONFIG, tmp_path / "whole")
    rows = start(parse(CONFIG), tmp_path / "cut")
    next(rows)
    rows.close()
    monkeypatch.undo()
    list(resume(parse(CONFIG), tmp_path / "cut"))
    assert json.loads((tmp_path / "cut" / "result.json").read_text())["digest"] == whole


@pytest.mark.slow
def test_run_stopped_before_it_began_gets_a_new_secret(tmp_path: Path) -> None:
    secret.save(tmp_path / "run", Key(5))
    digest_of_run(CONFIG, tmp_path / "run")
    assert secret.load(tmp_path / "run") != Key(5)


def test_existing_secret_is_never_replaced(tmp_path: Path) -> None:
    first = secret.load_or_save(tmp_path, secret.draw())
    assert secret.load_or_save(tmp_path, secret.draw()) == first
    with pytest.raises(PrivacyError, match="already exists"):
        secret.save(tmp_path, secret.draw())
    assert [path.name for path in (tmp_path / "private").iterdir()] == ["secret"]


def partial_secret_path(folder: Path) -> Path:
    """The temporary file that is renamed to the secret."""
    (folder / secret.FILE).parent.mkdir(parents=True, exist_ok=True)
    return folder / secret.FILE.with_name(f".secret.{os.getpid()}.part")


def test_symlink_at_the_temporary_secret_path_is_not_followed(tmp_path: Path) -> None:
    """Another user's symlink must neither redirect the secret nor overwrite its target."""
    target, part = tmp_path / "target", partial_secret_path(tmp_path)
    target.write_bytes(b"untouched")
    part.symlink_to(target)
    secret.save(tmp_path, Key(5))
    assert target.read_bytes() == b"untouched"
    assert secret.load(tmp_path) == Key(5)
    assert not (tmp_path / secret.FILE).is_symlink()


def test_leftover_temporary_secret_is_replaced_with_safe_permissions(tmp_path: Path) -> None:
    partial_secret_path(tmp_path).write_bytes(b"x" * 100)
    partial_secret_path(tmp_path).chmod(0o644)
    secret.save(tmp_path, Key(5))
    assert (tmp_path / secret.FILE).read_bytes() == (5).to_bytes(32, "big")
    assert stat.S_IMODE((tmp_path / secret.FILE).stat().st_mode) == 0o600


def test_symlink_that_appears_while_writing_the_secret_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, part = tmp_path / "target", partial_secret_path(tmp_path)
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: part.symlink_to(target))
    with pytest.raises((DiskError, PrivacyError)):
        secret.save(tmp_path, Key(5))
    assert not target.exists()


def test_secret_is_flushed_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a power cut could leave an empty secret, and the run could not be resumed."""
    synced = []

    def fsync(handle: int) -> None:
        synced.append((os.fstat(handle).st_size, (tmp_path / secret.FILE).exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    secret.save(tmp_path, Key(5))
    assert synced == [(32, False)]


def test_secret_file_is_hashed_to_a_256_bit_key(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"words that nobody else can guess")
    path.chmod(0o600)
    wanted = hashlib.blake2b(b"words that nobody else can guess", digest_size=32).hexdigest()
    assert secret.from_file(path) == Key(int(wanted, 16))


@pytest.mark.slow
def test_repeatable_run_has_no_secret_and_records_that(tmp_path: Path) -> None:
    assert digest_of_run(REPEATABLE, tmp_path / "a") == digest_of_run(REPEATABLE, tmp_path / "b")
    assert not (tmp_path / "a" / "private").exists()
    assert json.loads((tmp_path / "a" / "privacy.json").read_text())["repeatable"] is True
    page = report.page([report.load_run(tmp_path / "a")], tmp_path / "a.html").read_text()
    assert "its epsilon is only simulated" in page
    digest_of_run(CONFIG, tmp_path / "c")
    assert json.loads((tmp_path / "c" / "privacy.json").read_text())["repeatable"] is False
    assert (
        "its epsilon is only simulated"
        not in report.page([report.load_run(tmp_path / "c")], tmp_path / "c.html").read_text()
    )


@pytest.mark.slow
def test_secret_file_is_checked_and_not_copied_into_the_run(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    config = {**CONFIG, "engine": {"secret_file": str(path)}}
    with pytest.raises(PrivacyError, match=r"cannot read .*engine\.secret_file must name a file"):
        build(parse(config))
    path.write_bytes(b"short")
    with pytest.raises(PrivacyError, match="holds 5 bytes"):
        build(parse(config))
    path.write_bytes(b"words that nobody else can guess")
    path.chmod(0o644)
    with pytest.warns(UserWarning, match="can be read by other users; run: chmod 600"):
        assert build(parse(config)).run.secret is not None
    path.chmod(0o600)
    words = path.read_bytes()
    assert digest_of_run(config, tmp_path / "a") != digest_of_run(config, tmp_path / "b")
    stored = [(tmp_path / name / secret.FILE).read_bytes() for name in "ab"]
    assert stored[0] != stored[1]
    assert not [each for each in stored if words in each or secret.from_file(path).root == int.from_bytes(each, "big")]


def test_run_without_privacy_has_no_secret(tmp_path: Path) -> None:
    plain = {key: value for key, value in CONFIG.items() if key != "privacy"}
    assert build(parse(plain)).run.secret is None
    digest_of_run(plain, tmp_path / "run")
    assert not (tmp_path / "run" / "private").exists()


@pytest.mark.slow
def test_client_level_cohorts_do_not_follow_from_the_seed() -> None:
    """Sampling clients improves privacy only against those who do not know the cohort."""
    config = {**CONFIG, "privacy": {"noise": 1.0, "unit": "client"}, "federation": {"cohort": 1}}
    clients = [f"c{number}" for number in range(50)]
    runs = [build(parse(config)).run for _ in range(2)]
    drawn = [[run.draw_cohort(number, clients) for number in range(20)] for run in runs]
    assert drawn[0] != drawn[1]
    known = [replace(runs[0], secret=None).draw_cohort(number, clients) for number in range(20)]
    assert drawn[0] != known
    assert drawn[0] == [runs[0].draw_cohort(number, clients) for number in range(20)]
    by_example = [build(parse({**CONFIG, "federation": {"cohort": 1}})).run for _ in range(2)]
    assert by_example[0].draw_cohort(3, clients) == by_example[1].draw_cohort(3, clients)


def records(folder: Path, changed: float | None = None) -> dict[str, object]:
    """A table of 60 rows, in which one number may differ, and a config that trains on it."""
    folder.mkdir(exist_ok=True)
    draw = torch.Generator().manual_seed(1)
    pixels = torch.randn(60, 1, 4, 4, generator=draw)
    if changed is not None:
        pixels[7, 0, 0, 0] = changed
    torch.save({"pixels": pixels, "labels": torch.randint(0, 3, (60,), generator=draw)}, folder / "rows.pt")
    (folder / "task.py").write_text(READER)
    return {**CONFIG, "data": {"name": f"{folder / 'task.py'}:rows", "path": str(folder / "rows.pt")}}


READER = """
import torch
from partita.data.task import Table, Task

def rows(path: str) -> Task:
    held = torch.load(path)
    table = Table({"pixel_values": held["pixels"]}, held["labels"])
    return Task("rows", table, table, ("a", "b", "c"), {}, channels=1, size=4)
"""


@pytest.mark.fast_cases("True-client")
@pytest.mark.parametrize("unit", ["example", "client"])
@pytest.mark.parametrize("file", [True, False])
def test_two_runs_on_data_that_differ_in_a_record_share_no_noise(unit: str, file: bool, tmp_path: Path) -> None:
    """With equal noise, the difference of the two models would be the clipped gradient of that record."""
    (tmp_path / "secret").write_bytes(bytes(range(32)))
    (tmp_path / "secret").chmod(0o600)
    ends = []
    for name, changed in (("a", None), ("b", 3.0), ("other threads", None), ("again", None)):
        config = records(tmp_path / "data", changed) | {"privacy": {"noise": 1.0, "unit": unit}, "rounds": 1}
        if file:
            config["engine"] = {"secret_file": str(tmp_path / "secret"), "threads": 1 + (name == "other threads")}
        digest_of_run(config, tmp_path / name)
        ends.append(load_recorded_model(tmp_path / name).params())
    changed, threads, again = (max_difference(ends[0], other) for other in ends[1:])
    assert min(changed, threads) > 0.3 * again > 0.01, "as far apart as two runs on the same data"


@pytest.mark.slow
def test_each_run_of_a_comparison_has_a_secret_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(range(32)))
    (tmp_path / "secret").chmod(0o600)
    engine = {"secret_file": str(tmp_path / "secret"), "threads": 1}
    (tmp_path / "c.toml").write_text(tomli_w.dumps({**CONFIG, "rounds": 1, "engine": engine}))
    for again in ("first", "second"):  # the same runs in another folder
        runs = expand(tmp_path / "c.toml", [], "fedavg", 1, tmp_path / again)
        for _ in compare_all(runs, 1):
            pass
    found = [path.read_bytes() for path in tmp_path.glob("*/**/private/secret")]
    assert len({*found}) == len(found) == 2


def test_resume_refuses_changed_training_data(tmp_path: Path) -> None:
    """A round that is repeated on other data would add the same noise to it."""
    config = parse(records(tmp_path / "data"))
    rows = start(config, tmp_path / "run")
    next(rows)
    rows.close()
    records(tmp_path / "data", 3.0)
    with pytest.raises(PrivacyError, match="was started with other training data or another secret; restore them"):
        list(resume(config, tmp_path / "run"))
    records(tmp_path / "data")
    assert len(list(resume(config, tmp_path / "run"))) == 1


def test_warning_about_a_readable_secret_file_names_the_line_that_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(bytes(secret.MIN_BYTES))
    path.chmod(0o640)
    with pytest.warns(UserWarning, match="can be read by other users") as seen:
        secret.from_file(path)
    assert [each.filename for each in seen] == [__file__]
    path.chmod(0o604)
    with pytest.warns(UserWarning, match="can be read by other users"):
        secret.from_file(path)
