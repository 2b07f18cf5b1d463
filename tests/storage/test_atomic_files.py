"""Files are complete or absent: what is written where, in which order it reaches the disk, and what is refused."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from partita.storage import atomic_files
from partita.storage.atomic_files import DamageError, DiskError, LinkError


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What reaches the disk, in order: synced files with their sizes, synced folders, and renames."""
    log: list[str] = []
    fsync, rename = os.fsync, os.replace

    def synced(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        log.append(f"folder {path.relative_to(tmp_path)}" if path.is_dir() else f"{path.stat().st_size} bytes")
        fsync(handle)

    def renamed(old: Path, new: Path) -> None:
        log.append(f"rename to {new.relative_to(tmp_path)}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    return log


def test_a_file_is_on_the_disk_before_it_has_its_name(disk: list[str], tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    for data in (b"first", b"second"):
        disk.clear()
        atomic_files.write(path, data)
        assert path.read_bytes() == data
        assert disk == [f"{len(data)} bytes", "rename to a/b/file", "folder a/b"]
        assert os.listdir(path.parent) == ["file"]


def test_a_file_that_need_not_survive_a_power_cut_does_not_wait_for_the_disk(disk: list[str], tmp_path: Path) -> None:
    atomic_files.write(tmp_path / "file", b"data", sync=False)
    assert (tmp_path / "file").read_bytes() == b"data"
    assert disk == ["rename to file"]


def test_what_is_appended_is_on_the_disk_and_so_is_a_new_name(disk: list[str], tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_files.append(path, b"one")
    assert disk == ["3 bytes", "folder ."]
    disk.clear()
    atomic_files.append(path, b"two")
    assert disk == ["6 bytes"]
    assert path.read_bytes() == b"onetwo"


def test_a_file_for_its_owner_alone_is_never_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    for data in (b"one", b"two"):
        atomic_files.write(path, data, mode=0o600)
        assert path.stat().st_mode & 0o777 == 0o600


def test_what_a_dead_process_left_is_in_nobodys_way(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"kept")
    (tmp_path / f".file.{os.getpid()}.part").symlink_to(target)
    atomic_files.write(tmp_path / "file", b"data")
    assert (tmp_path / "file").read_bytes() == b"data"
    assert target.read_bytes() == b"kept"


def test_a_file_that_another_plants_meanwhile_is_not_written_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    planted = tmp_path / f".file.{os.getpid()}.part"
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: planted.write_bytes(b"theirs"))
    with pytest.raises(DiskError, match="File exists"):
        atomic_files.write(tmp_path / "file", b"ours")
    assert planted.read_bytes() == b"theirs"
    monkeypatch.setattr(Path, "unlink", unlink)


def test_no_handle_stays_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(LinkError):
        atomic_files.read(tmp_path)
    atomic_files.write(tmp_path / "file", b"data")
    atomic_files.append(tmp_path / "file", b"data")
    atomic_files.read(tmp_path / "file")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_write_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    atomic_files.write(tmp_path / "file", b"before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DiskError, match=r"No space left on device; 5 bytes"):
        atomic_files.write(tmp_path / "file", b"after")
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"before"
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskError, match=r"No space left on device; 4 bytes"):
        atomic_files.append(tmp_path / "file", b"more")
    with pytest.raises(DiskError, match="cannot write"):
        atomic_files.write(tmp_path / "file" / "below", b"data")


def test_a_checksummed_file_has_its_number_and_digest_in_its_name(tmp_path: Path) -> None:
    first, second = (atomic_files.write_checksummed(tmp_path, 7, data) for data in (b"old", b"new"))
    other = atomic_files.write_checksummed(tmp_path, 12, b"new")
    assert second.name == f"000007-{hashlib.blake2b(b'new', digest_size=16).hexdigest()}.safetensors"
    assert not first.exists()
    (tmp_path / "000003-short.safetensors").touch()
    assert atomic_files.list_checksummed(tmp_path) == [second, other]
    assert [atomic_files.number_in_name(path) for path in (second, other)] == [7, 12]
    assert atomic_files.digest_in_name(second) == atomic_files.digest(b"new")
    assert atomic_files.read_checksummed(second, "start again") == b"new"
    again = atomic_files.write_checksummed(tmp_path, 7, b"new")
    assert again == second
    assert atomic_files.list_checksummed(tmp_path) == [second, other]
    second.write_bytes(b"other")
    with pytest.raises(DamageError, match="start again"):
        atomic_files.read_checksummed(second, "start again")
    assert atomic_files.list_checksummed(tmp_path / "missing") == []
    assert atomic_files.list_checksummed(second) == []


def test_files_and_lines_up_to_the_limit_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc\nde\n")
    assert atomic_files.read(path, 7) == b"abc\nde\n"
    with pytest.raises(DamageError, match="has 7 bytes; the limit is 6"):
        atomic_files.read(path, 6)
    monkeypatch.setattr(atomic_files, "MAX_LINE_BYTES", 4)
    assert list(atomic_files.lines(path)) == [b"abc\n", b"de\n"]
    monkeypatch.setattr(atomic_files, "MAX_LINE_BYTES", 3)
    with pytest.raises(DamageError, match="line 1 has more than 3 bytes"):
        list(atomic_files.lines(path))
    path.write_bytes(b"ab\nabcd\n")
    with pytest.raises(DamageError, match="line 2 has more than 3 bytes"):
        list(atomic_files.lines(path))


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Whoever waits for the other end of a pipe is interrupted."""

    def interrupt(*_: object) -> None:
        raise TimeoutError("it waits for the other end of a pipe")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("no_waiting")
def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LinkError, match="is a symbolic link"):
        atomic_files.read(tmp_path / "link")
    for name in ("pipe", "."):
        with pytest.raises(LinkError, match="is not a regular file"):
            atomic_files.read(tmp_path / name)
    with pytest.raises(LinkError, match="is not a regular file"):
        atomic_files.append(tmp_path / "pipe", b"data")
    with pytest.raises(FileNotFoundError):
        atomic_files.read(tmp_path / "missing")
    with atomic_files.open_regular_file(tmp_path / "file") as file:
        assert not os.get_inheritable(file.fileno())


def test_a_new_file_has_the_permissions_that_the_user_chose(tmp_path: Path) -> None:
    for mask, mode in ((0o022, 0o644), (0o077, 0o600), (0o000, 0o666)):
        before = os.umask(mask)
        try:
            atomic_files.write(tmp_path / "file", b"data")
        finally:
            os.umask(before)
        assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_links_are_found_at_any_depth(tmp_path: Path) -> None:
    below = tmp_path / "run" / "a" / "b"
    below.mkdir(parents=True)
    (below / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    atomic_files.refuse_links(tmp_path / "link")
    (below / "link").symlink_to(below / "file")
    with pytest.raises(LinkError, match=r"a/b/link is a symbolic link"):
        atomic_files.refuse_links(tmp_path / "run")
    (below / "link").unlink()
    (below / "link").symlink_to(tmp_path)
    with pytest.raises(LinkError, match=r"a/b/link is a symbolic link"):
        atomic_files.refuse_links(tmp_path / "run")
    (below / "link").unlink()
    os.mkfifo(below / "pipe")
    with pytest.raises(LinkError, match=r"a/b/pipe is not a regular file"):
        atomic_files.refuse_links(tmp_path / "run")
