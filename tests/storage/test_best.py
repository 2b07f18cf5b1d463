"""The best checkpoint stays when newer ones replace it, with the clients' states that belong to it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from partita.core.client import ClientState
from partita.core.server_rule import Server
from partita.storage import atomic_files, checkpoint
from partita.storage.atomic_files import DamageError, list_checksummed, number_in_name
from partita.storage.client_store import DiskStore, MemoryStore


def server(value: float) -> Server:
    return Server({"w": torch.full((3,), float(value))})


def save(folder: Path, *done: int, best: tuple[int, ...] = ()) -> None:
    for number in done:
        checkpoint.save(folder, number, server(number), "run", best=number in best)


def kept(folder: Path) -> tuple[list[int], list[int]]:
    """The rounds of the checkpoints, and of the best ones."""
    newest, best = (list(map(number_in_name, list_checksummed(each))) for each in (folder, folder / checkpoint.BEST))
    return newest, best


def test_best_checkpoint_stays_when_newer_ones_replace_it(tmp_path: Path) -> None:
    assert checkpoint.best(tmp_path) is None
    save(tmp_path, *range(1, 8), best=(1, 3))
    assert kept(tmp_path) == ([6, 7], [3])
    found = checkpoint.best(tmp_path, "run", server(0.0))
    assert found is not None
    assert (found.done, found.run) == (3, "run")
    assert torch.equal(found.server.params["w"], torch.full((3,), 3.0))


def test_best_checkpoint_of_the_older_checkpoint_stays_too(tmp_path: Path) -> None:
    """The older checkpoint is the fallback, and a run that resumes from it needs the best one of that time."""
    save(tmp_path, 1, 2, 3, 4, 5, best=(2, 5))
    assert kept(tmp_path) == ([4, 5], [2, 5])
    list_checksummed(tmp_path)[-1].unlink()
    checkpoint.rewind_best(tmp_path, 4, 2)
    assert kept(tmp_path) == ([4], [2])
    save(tmp_path, 5, 6, best=(5,))
    assert kept(tmp_path) == ([5, 6], [5])


def test_rewind_marks_a_checkpoint_whose_mark_was_lost_to_a_kill(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, best=(1,))
    checkpoint.rewind_best(tmp_path, 3, 3)
    assert kept(tmp_path) == ([2, 3], [1, 3])
    checkpoint.rewind_best(tmp_path, 3, None)
    assert kept(tmp_path) == ([2, 3], [1, 3]), "a run without validation has nothing to check"
    checkpoint.rewind_best(tmp_path, 0, None)
    assert kept(tmp_path) == ([2, 3], [])


def test_missing_or_damaged_best_checkpoint_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, best=(1,))
    [path] = list_checksummed(tmp_path / checkpoint.BEST)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    said = r"is damaged: .*; restore it from a copy, or delete the folder 'checkpoints'"
    with pytest.raises(DamageError, match=said):
        checkpoint.rewind_best(tmp_path, 4, 1)
    with pytest.raises(DamageError, match=said):
        checkpoint.best(tmp_path)
    path.write_bytes(data)
    with pytest.raises(DamageError, match="belongs to another run"):
        checkpoint.best(tmp_path, "another")
    with pytest.raises(DamageError, match=r"another model or method; restore it from a copy"):
        checkpoint.best(tmp_path, "run", Server({"w": torch.zeros(4)}))
    path.rename(path.with_name(path.name.replace("000001", "000002")))
    with pytest.raises(DamageError, match="a checkpoint of 1 rounds under another name"):
        checkpoint.best(tmp_path)
    list_checksummed(tmp_path / checkpoint.BEST)[0].unlink()
    with pytest.raises(DamageError, match=r"best lacks the checkpoint of 1 rounds, the best so far; restore it"):
        checkpoint.rewind_best(tmp_path, 4, 1)


def test_file_system_without_hard_links_gets_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **more: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    save(tmp_path, 1, 2, best=(1,))
    path = list_checksummed(tmp_path)[0]
    assert (tmp_path / checkpoint.BEST / path.name).read_bytes() == path.read_bytes()
    assert path.stat().st_nlink == 1
    found = checkpoint.best(tmp_path)
    assert found is not None
    assert found.done == 1


def test_link_keeps_one_file_under_two_names(tmp_path: Path) -> None:
    path = atomic_files.write_checksummed(tmp_path, 3, b"data")
    for _ in range(2):
        atomic_files.link_checksummed(path, tmp_path / "other")
    assert (tmp_path / "other" / path.name).samefile(path)
    path.unlink()
    assert (tmp_path / "other" / path.name).read_bytes() == b"data"


@pytest.mark.parametrize("in_memory", [False, True])
def test_states_of_the_best_round_stay(in_memory: bool, tmp_path: Path) -> None:
    """Also those of the best round at the time of the older checkpoint."""

    def state(value: float) -> ClientState:
        return ClientState({"w": torch.tensor([value])}, {})

    disk = DiskStore(tmp_path, newest={})
    store = MemoryStore(disk) if in_memory else disk
    found = {}
    best = None
    for number in range(8):
        store.save("a", number, state(number))
        done = number + 1
        best = done if done in (2, 6) else best
        store.commit(done, best)
        found[done] = dict(store.states())
        rounds = list(map(number_in_name, list_checksummed(tmp_path / "a")))
        assert {number, *([best - 1] if best else [])} <= set(rounds)
        assert len(rounds) <= 5
        if done == 7:
            assert 1 in rounds, "at the older checkpoint, the second round was the best"
    assert 1 not in rounds, "the state of a former best round goes"
    assert DiskStore(tmp_path, newest=found[6]).load("a", 6).personal["w"] == 5
