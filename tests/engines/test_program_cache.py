"""Compiled programs are kept in a folder that only the user can write to."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from partita.core.settings import RunError
from partita.engines.program_cache import VARIABLE, use_program_cache


@pytest.fixture(autouse=True)
def _torch_uses_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")  # so that the test's own value is undone
    monkeypatch.delenv(VARIABLE)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_the_folder_is_new_and_for_the_user_alone(cache: Path) -> None:
    use_program_cache(cache)
    folder = Path(os.environ[VARIABLE])
    assert folder.parent == cache.resolve()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    use_program_cache(cache / "elsewhere")  # a second run of the process stays there
    assert Path(os.environ[VARIABLE]) == folder


def test_a_folder_of_the_users_choice_is_used(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    use_program_cache(cache)
    assert os.environ[VARIABLE] == str((tmp_path / "mine").resolve())
    assert not cache.exists()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused(cache: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    cache.chmod(mode)
    monkeypatch.setenv(VARIABLE, str(cache))
    with pytest.raises(RunError, match=f"other users can write to it.*set {VARIABLE} to a folder that only you"):
        use_program_cache(cache)


def test_a_folder_of_another_user_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_program_cache(cache)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(RunError, match="other users can write to it"):
        use_program_cache(cache)


def test_a_folder_below_one_that_everybody_can_change_is_refused(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(RunError, match=r"can replace what is in .*cache, .*PARTITA_CACHE.*engine.compile to false"):
        use_program_cache(cache)
    assert VARIABLE not in os.environ
    cache.chmod(0o1777)  # as /tmp: nobody can rename what belongs to others
    use_program_cache(cache)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="Not a directory"):
        use_program_cache(tmp_path / "file")
