"""One process at a time uses a run folder; forks and killed processes are in test_kill.py."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from partita.experiment import run_folder
from partita.experiment.run_folder import RunFolderError, lock
from partita.storage.atomic_files import DiskError


def test_a_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(RunFolderError, match="in use by"), lock(tmp_path / "run"), lock(tmp_path / "run"):
            pass
    assert (tmp_path / "run" / ".lock").read_bytes() == b""


def test_a_link_that_appears_after_the_check_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    target = tmp_path / "target"
    monkeypatch.setattr(run_folder, "refuse_links", lambda folder: (folder / ".lock").symlink_to(target))
    with pytest.raises(DiskError, match="cannot write to"), lock(tmp_path / "run"):
        pass
    assert not target.exists()


def test_the_content_of_a_file_under_the_locks_name_stays(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    os.link(tmp_path / "notes", tmp_path / ".lock")
    with lock(tmp_path):
        pass
    assert (tmp_path / "notes").read_text() == "mine"


def test_without_kernel_locks_a_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(handle: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", missing)
    with pytest.raises(DiskError, match="not implemented"), lock(tmp_path):
        pass


def test_another_thread_may_close_the_generator_that_holds_a_lock(tmp_path: Path) -> None:
    def hold() -> Iterator[None]:
        with lock(tmp_path):
            yield

    holder = hold()
    next(holder)
    closer = threading.Thread(target=holder.close)
    closer.start()
    closer.join()
    with lock(tmp_path):
        pass


def test_a_child_that_ends_leaves_the_lock_with_its_parent(tmp_path: Path) -> None:
    with lock(tmp_path):
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(RunFolderError, match="in use by another process"), lock(tmp_path):
            pass
