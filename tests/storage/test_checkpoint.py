"""Checkpoints, checksummed files and client states: round trips, damage, failed writes, retention, odd names."""

from __future__ import annotations

import errno
import json
import os
import posix
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers import Clients, ServerMomentum, files_in, final_params, play, toy_model, toy_run
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.core import memory, serialization, tensors
from partita.core.client import ClientState
from partita.core.method import Method
from partita.core.rounds import rounds
from partita.core.server_rule import Server
from partita.core.versions import ParameterVersions
from partita.engines.availability import Availability
from partita.engines.simulation import SimulationEngine
from partita.methods.fedavg import fedavg
from partita.methods.local_only import local_only
from partita.storage import atomic_files, checkpoint
from partita.storage.atomic_files import DamageError, DiskError
from partita.storage.client_store import DiskStore, MemoryStore

MODEL = toy_model()
FOUR = Clients(a=5, b=6, c=7, d=8)


def make_server(value: float = 1.0) -> Server:
    ledger = ParameterVersions(
        {"w": 2, "b": 0}, {"ü/x": (2, 0), "a": (-1, 0), "z": (2, 0)}, clients_have_initial_model=True
    )
    params = {"w": torch.full((2, 3), value), "b": torch.tensor(value / 3, dtype=torch.bfloat16)}
    moved = {"w": torch.arange(3.0) * value, "b": torch.ones(1)}
    return Server(params, {"velocity": moved, "count": {"w": torch.tensor(7)}, "nothing yet": {}}, ledger)


def assert_same(one: Server, two: Server) -> None:
    assert tensors.digest(one.params) == tensors.digest(two.params)
    assert list(one.params) == list(two.params)
    assert one.state.keys() == two.state.keys()
    assert all(list(one.state[slot]) == list(two.state[slot]) for slot in one.state)
    assert all(tensors.digest(one.state[slot]) == tensors.digest(two.state[slot]) for slot in one.state)
    assert one.versions == two.versions
    assert list(one.versions.current) == list(two.versions.current)


# ---- checkpoints


@pytest.mark.parametrize(
    "server", [make_server(), Server({"w": torch.zeros(2)}, {}, ParameterVersions({"w": 0}))], ids=["full", "new"]
)
def test_checkpoint_round_trips_bit_for_bit(tmp_path: Path, server: Server) -> None:
    path = checkpoint.save(tmp_path, 5, server)
    done, back = checkpoint.load(path)
    assert done == 5
    assert_same(server, back)
    rows = {id(row) for row in back.versions.held.values()}
    assert len(rows) == len(set(back.versions.held.values()))


@pytest.mark.parametrize("owners", [(), ("a",), ("a", "z", "ü/x"), ("a", "other")])
def test_checkpoint_records_its_client_states(tmp_path: Path, owners: tuple[str, ...]) -> None:
    """Also for clients unknown to the parameter versions, and when other clients are known."""
    states = {client: (place + 3, f"{place + 1:032x}") for place, client in enumerate(owners)}
    saved = checkpoint.read(checkpoint.save(tmp_path, 5, make_server(), "my run", "my rows", states))
    assert saved.states == states
    assert (saved.done, saved.run, saved.rows) == (5, "my run", "my rows")
    assert_same(saved.server, make_server())


@pytest.mark.parametrize("states", [{}, {"a": (3, "0" * 32)}])
def test_checkpoint_stores_versions_in_32_bits_and_digests_in_bytes(
    tmp_path: Path, states: dict[str, tuple[int, str]]
) -> None:
    path = checkpoint.save(tmp_path, 5, make_server(), states=states)
    stored = safetensors.torch.load(path.read_bytes())
    kinds = {name: stored[name].dtype for name in stored if name.startswith(("ledger/", "clients/"))}
    assert kinds == {
        "ledger/versions": torch.int32,
        "ledger/held": torch.int32,
        "clients/round": torch.int32,
        "clients/digest": torch.uint8,
    }


def test_tensors_are_loaded_onto_the_given_device(tmp_path: Path) -> None:
    """The device "meta" stands for a GPU."""
    path = checkpoint.save(tmp_path / "server", 5, make_server())
    DiskStore(tmp_path).save("a", 0, make_state(1.0))
    for device in (None, torch.device("cpu"), torch.device("meta")):
        server = checkpoint.read(path, device).server
        state = DiskStore(tmp_path, device).load("a", 1)
        parts = (server.params, *server.state.values(), state.personal, *state.memory.values())
        assert {value.device for part in parts for value in part.values()} == {device or torch.device("cpu")}
        assert server.versions == make_server().versions


def test_newest_returns_the_latest_checkpoint_or_the_initial_server(tmp_path: Path) -> None:
    first = make_server(1.0)
    none = checkpoint.newest(tmp_path, "my run", first)
    assert (none.done, none.server) == (0, first)
    for done in (3, 4, 5):
        checkpoint.save(tmp_path, done, make_server(float(done)), "my run")
        found = checkpoint.newest(tmp_path, "my run", first)
        assert found.done == done
        assert_same(found.server, make_server(float(done)))
    with pytest.raises(DamageError, match="belongs to another run"):
        checkpoint.newest(tmp_path, "another", first)


def test_checkpoint_stores_a_tensor_shared_by_params_and_state(tmp_path: Path) -> None:
    """A rule that stores the last round's parameters in its state holds such a tensor."""
    params = {"w": torch.arange(3.0)}
    server = Server(params, {"before": params}, ParameterVersions({"w": 0}))
    assert_same(server, checkpoint.load(checkpoint.save(tmp_path, 1, server))[1])


@pytest.mark.parametrize("optimizer", [None, "carried"])
def test_run_resumes_bit_for_bit_with_server_rule_state(tmp_path: Path, optimizer: str | None) -> None:
    run = toy_run(Method("momentum", server_rule=ServerMomentum(), carry_optimizer=bool(optimizer)), 5, cohort=0.5)
    whole = play(run, MODEL, FOUR)
    disk = DiskStore(tmp_path / "clients")
    stream = rounds(run, MODEL, SimulationEngine(run, MODEL, FOUR, store=disk))
    for _ in range(2):
        each = next(stream)
    path = checkpoint.save(tmp_path / "server", 2, each.server)
    done, server = checkpoint.load(path)
    assert_same(server, each.server)
    assert not torch.equal(server.state["velocity"]["head.weight"], torch.zeros(3, 4))
    rest = play(run, MODEL, FOUR, server=server, start=done, store=DiskStore(disk.folder))
    assert tensors.digest(final_params(rest)) == tensors.digest(final_params(whole))
    assert_same(rest[-1].server, whole[-1].server)
    assert [each.traffic for each in rest] == [each.traffic for each in whole[2:]]


def test_only_the_newest_two_checkpoints_are_kept(tmp_path: Path) -> None:
    for done in (1, 2, 3, 10, 11):
        checkpoint.save(tmp_path, done, make_server(done))
    assert [atomic_files.number_in_name(path) for path in atomic_files.list_checksummed(tmp_path)] == [10, 11]
    assert files_in(tmp_path) == {path.name for path in atomic_files.list_checksummed(tmp_path)}


def test_second_checkpoint_of_a_round_replaces_the_first(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, make_server())
    for value in (2.0, 3.0, 3.0):
        path = checkpoint.save(tmp_path, 2, make_server(value))
    assert [atomic_files.number_in_name(each) for each in atomic_files.list_checksummed(tmp_path)] == [1, 2]
    assert float(checkpoint.load(path)[1].params["w"][0, 0]) == 3.0


DAMAGE: dict[str, Any] = {
    "a bit flipped in the tensors": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "a bit flipped in the header": lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
    "cut": lambda data: data[:-5],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\0",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_checkpoint_is_named_with_a_remedy(tmp_path: Path, kind: str) -> None:
    older, newest = (checkpoint.save(tmp_path, done, make_server(done)) for done in (1, 2))
    newest.write_bytes(DAMAGE[kind](newest.read_bytes()))
    with pytest.raises(
        DamageError, match=rf"{newest.name} is damaged: .*; delete it to resume from the checkpoint before it"
    ):
        checkpoint.load(newest)
    newest.unlink()
    assert checkpoint.load(atomic_files.list_checksummed(tmp_path)[-1])[0] == 1
    assert older.exists()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failed_write_leaves_existing_files_intact(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = checkpoint.save(tmp_path, 1, make_server())
    kept = files_in(tmp_path)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(
            DiskError,
            match=r"cannot write .*000002-\w+\.safetensors \(No space left on device; [\d,]+ bytes\); "
            "what was saved before is intact: free some space or fix the folder, then resume the run",
        ):
            checkpoint.save(tmp_path, 2, make_server(2.0))
    assert files_in(tmp_path) == kept
    assert_same(checkpoint.load(first)[1], make_server())
    assert checkpoint.load(checkpoint.save(tmp_path, 2, make_server(2.0)))[0] == 2


def test_uncreatable_folder_is_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DiskError, match=r"cannot write .*what was saved before is intact"):
        checkpoint.save(tmp_path / "file" / "server", 1, make_server())


def test_files_without_a_checksum_name_are_left_alone(tmp_path: Path) -> None:
    for name in ("notes.txt", "model.safetensors", ".000009-x.safetensors.12.part"):
        (tmp_path / name).write_text("mine")
    for done in range(4):
        checkpoint.save(tmp_path, done, make_server(done))
    assert {"notes.txt", "model.safetensors", ".000009-x.safetensors.12.part"} < files_in(tmp_path)
    assert [atomic_files.number_in_name(path) for path in atomic_files.list_checksummed(tmp_path)] == [2, 3]


def test_write_flushes_before_renaming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a power cut can leave an empty file under the final name."""
    calls: list[str] = []
    sync, rename = posix.fsync, os.replace  # the real calls: conftest.py disables fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("sync"), sync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("rename"), rename(*paths))[1])
    atomic_files.write(tmp_path / "new" / "x", b"data")
    assert calls == ["sync", "rename", "sync"]
    assert (tmp_path / "new" / "x").read_bytes() == b"data"


# ---- client states


def make_state(value: float) -> ClientState:
    return ClientState({"w": torch.full((2,), value)}, {"optimizer.momentum": {"w": torch.full((2,), value / 2)}})


def personal_value(state: ClientState) -> float | None:
    return float(state.personal["w"][0]) if state.personal else None


@pytest.mark.parametrize(
    "name", ["a/b", "ü", "..", ".", "a b", "c:d", "%2F", "a%2Fb", "con", "x" * 60, "日本", "-", "~", "a.b"]
)
def test_any_client_name_gets_its_own_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "runs" / "clients"
    disk = DiskStore(folder)
    for client, value in ((name, 1.0), ("other", 2.0), (name + "x", 3.0)):
        disk.save(client, 0, make_state(value))
    assert [personal_value(disk.load(client, 1)) for client in (name, "other", name + "x")] == [1.0, 2.0, 3.0]
    assert files_in(tmp_path) == {f"runs/clients/{inside}" for inside in files_in(folder)}
    assert len(files_in(folder)) == 3
    assert disk.known() == sorted([name, "other", name + "x"])
    disk.rewind(0)
    assert files_in(tmp_path) == set()


def test_client_state_round_trips_bit_for_bit(tmp_path: Path) -> None:
    state = ClientState(
        {"w": torch.randn(3, 2), "layers/0.b": torch.zeros(0)},
        {"h": {"w": torch.tensor(3)}, "optimizer.age": {"w": torch.tensor(5)}, "half": {"w": torch.ones(2).bfloat16()}},
    )
    disk = DiskStore(tmp_path)
    disk.save("c", 3, state)
    back = disk.load("c", 4)
    assert tensors.digest(back.personal) == tensors.digest(state.personal)
    assert back.memory.keys() == state.memory.keys()
    assert all(tensors.digest(back.memory[slot]) == tensors.digest(state.memory[slot]) for slot in state.memory)


def test_state_stores_a_tensor_shared_by_personal_and_memory(tmp_path: Path) -> None:
    """A rule that stores its final parameters returns such a tensor."""
    value = {"w": torch.arange(3.0)}
    DiskStore(tmp_path).save("c", 0, ClientState(value, {"end": value}))
    back = DiskStore(tmp_path).load("c", 1)
    assert tensors.equal(back.personal, value)
    assert tensors.equal(back.memory["end"], value)


@pytest.mark.parametrize("kind", ["disk", "memory over disk"])
def test_load_returns_the_newest_state_before_the_round(tmp_path: Path, kind: str) -> None:
    disk = DiskStore(tmp_path)
    for number in (0, 2, 5, 11):
        disk.save("c", number, make_state(number))
    store = disk if kind == "disk" else MemoryStore(disk)
    expected = {0: None, 1: 0.0, 2: 0.0, 3: 2.0, 5: 2.0, 6: 5.0, 11: 5.0, 12: 11.0, 100: 11.0}
    assert {number: personal_value(store.load("c", number)) for number in expected} == expected
    assert personal_value(store.load("stranger", 100)) is None


def test_only_states_named_by_the_checkpoint_are_loaded(tmp_path: Path) -> None:
    """An extra state file of the same round is ignored, and a missing one is an error."""
    written = DiskStore(tmp_path, newest={})
    assert written.states() == {}
    assert written.load("a", 0).personal == {}
    for number in range(3):
        written.save("a", number, ClientState({"w": torch.tensor([float(number)])}))
    states = dict(written.states())
    assert states.keys() == {"a"}
    assert states["a"][0] == 2
    found = DiskStore(tmp_path, newest=states)
    assert found.known() == ["a"]
    assert found.load("a", 3).personal["w"].item() == 2.0
    assert found.load("a", 2).personal["w"].item() == 1.0, "the newest state before that round"
    assert found.load("new", 3).personal == {}
    DiskStore(tmp_path).save("stranger", 0, ClientState({"w": torch.ones(1)}))
    assert [found.load("stranger", number).personal for number in (1, 3)] == [{}, {}]
    assert found.known() == ["a"]
    assert DiskStore(tmp_path).states() == {}
    found.rewind(3)
    atomic_files.list_checksummed(tmp_path / "a")[-1].unlink()
    with pytest.raises(DamageError, match="is missing: it is the state of client 'a'"):
        found.load("a", 3)
    with pytest.raises(DamageError, match="is missing: it is the state of client 'a'"):
        found.rewind(3)


def test_zeros_in_a_state_are_not_stored_and_come_back(tmp_path: Path) -> None:
    """SCAFFOLD's memory is zero for all frozen parameters of a model with LoRA."""
    control = {"b": torch.zeros(1000), "a": torch.ones(2), "c": torch.full((3,), -0.0), "late": torch.eye(100)[99]}
    kinds = {"half": torch.zeros(2, 3, dtype=torch.bfloat16), "count": torch.tensor(0), "none": torch.empty(0)}
    state = ClientState({}, {"control": control, "all.zero": kinds})
    DiskStore(tmp_path).save("x", 0, state)
    [path] = atomic_files.list_checksummed(tmp_path / "x")
    assert path.stat().st_size < 1500
    back = DiskStore(tmp_path).load("x", 1)
    assert back.personal == {}
    assert list(back.memory) == ["all.zero", "control"]
    assert [list(part) for part in back.memory.values()] == [["count", "half", "none"], ["a", "b", "c", "late"]]
    assert all(tensors.equal(back.memory[slot], part) for slot, part in state.memory.items())


def test_state_of_another_format_is_refused(tmp_path: Path) -> None:
    atomic_files.write_checksummed(tmp_path / "x", 0, safetensors.torch.save({"personal/w": torch.ones(1)}, {"a": "b"}))
    with pytest.raises(
        DamageError, match="is not a state of this version of partita; restore this state of client 'x'"
    ):
        DiskStore(tmp_path).load("x", 1)


@pytest.mark.parametrize(
    "shape",
    [[10**9, 10**9], [-1], ["a"], "3", [10**30], None],
    ids=["huge", "negative", "text", "no list", "10^30", "none"],
)
def test_promises_of_impossible_zeros_are_refused(tmp_path: Path, shape: object) -> None:
    about = json.dumps({"client": "x", "zeros": [("personal", "w", "F32", shape)]})
    atomic_files.write_checksummed(tmp_path / "x", 0, serialization.pack({}, {"partita": about}))
    with pytest.raises(DamageError, match="is not a state of this version of partita"):
        DiskStore(tmp_path).load("x", 1)


def test_zeros_of_a_state_must_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DiskStore(tmp_path).save("x", 0, ClientState({"w": torch.zeros(4)}))
    monkeypatch.setattr(memory, "available", lambda: 15)
    with pytest.raises(DamageError, match="is not a state of this version of partita"):
        DiskStore(tmp_path).load("x", 1)
    monkeypatch.setattr(memory, "available", lambda: 16)
    assert torch.equal(DiskStore(tmp_path).load("x", 1).personal["w"], torch.zeros(4))


def test_zeros_of_a_type_that_files_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(serialization.SerializationError, match="personal/w"):
        DiskStore(tmp_path).save("x", 0, ClientState({"w": torch.zeros(2, dtype=torch.complex128)}))


def test_known_clients_include_names_too_long_for_a_folder(tmp_path: Path) -> None:
    disk, names = DiskStore(tmp_path), ["long " * 60, "longer " * 60]
    for client, number in ((names[0], 0), (names[1], 0), (names[1], 1), ("short", 0)):
        disk.save(client, number, ClientState({"w": torch.ones(1)}))
    assert disk.known() == [*names, "short"]


def test_memory_store_commits_to_disk_and_lists_clients_of_both(tmp_path: Path) -> None:
    DiskStore(tmp_path).save("before", 0, ClientState({"w": torch.ones(1)}))
    memory = MemoryStore(DiskStore(tmp_path, newest={"before": (0, "")}))
    for number in range(6):
        memory.save("a", number, ClientState({"w": torch.tensor([float(number)])}))
        assert memory.known() == ["a", "before"]
        memory.commit(number + 1)
    assert len(atomic_files.list_checksummed(tmp_path / "a")) <= 3, "states that no checkpoint needs are dropped"
    assert memory.states()["a"][0] == 5
    assert MemoryStore().states() == {}


def test_rewind_drops_states_of_later_rounds(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path)
    for client in ("c", "a/b"):
        for number in range(5):
            disk.save(client, number, make_state(number))
    disk.rewind(3)
    assert [personal_value(disk.load(client, 100)) for client in ("c", "a/b")] == [2.0, 2.0]
    assert [personal_value(disk.load(client, 2)) for client in ("c", "a/b")] == [1.0, 1.0]


def test_memory_store_writes_only_changed_states_at_a_commit(tmp_path: Path) -> None:
    memory = MemoryStore(DiskStore(tmp_path))
    memory.save("a", 0, make_state(0))
    memory.save("b", 0, make_state(1))
    assert files_in(tmp_path) == set()
    memory.commit(1)
    assert len(files_in(tmp_path)) == 2
    memory.save("a", 1, make_state(2))
    memory.commit(2)
    assert sorted(name.split("-")[0] for name in files_in(tmp_path)) == ["a/000000", "a/000001", "b/000000"]
    fresh = MemoryStore(DiskStore(tmp_path))
    assert [personal_value(fresh.load("a", number)) for number in (1, 2)] == [0.0, 2.0]
    assert personal_value(memory.load("a", 2)) == 2.0
    assert fresh.known() == ["a", "b"]


def test_memory_store_without_disk_keeps_the_last_state() -> None:
    memory = MemoryStore()
    memory.save("a", 0, make_state(4))
    memory.commit(1)
    assert personal_value(memory.load("a", 1)) == 4.0
    assert memory.load("b", 1) == ClientState()


def test_damaged_state_names_file_client_and_remedy(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path)
    disk.save("a/b", 0, make_state(1))
    [name] = files_in(tmp_path)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(
        DamageError, match=r"000000-\w+\.safetensors is damaged.*client 'a/b' from a copy, or start a new run"
    ):
        disk.load("a/b", 1)


@given(data=st.data(), in_memory=st.booleans())
@settings(max_examples=25)
def test_last_two_checkpoints_stay_usable_while_older_states_are_deleted(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, in_memory: bool
) -> None:
    """Random rounds and checkpoints: every kept checkpoint finds the states its clients would resume from."""
    folder = tmp_path_factory.mktemp("store")
    disk = DiskStore(folder)
    store = MemoryStore(disk) if in_memory else disk
    history: dict[str, list[int]] = {"a": [], "b": []}
    commits: list[int] = []
    for number in range(data.draw(st.integers(1, 8))):
        for client in sorted(data.draw(st.sets(st.sampled_from(["a", "b"])))):
            store.save(client, number, make_state(number))
            history[client].append(number)
        if data.draw(st.booleans()):
            store.commit(number + 1)
            commits.append(number + 1)
        for done in commits[-2:]:
            fresh = DiskStore(folder)
            for client, visits in history.items():
                expected = max((visit for visit in visits if visit < done), default=None)
                assert personal_value(fresh.load(client, done)) == expected
    for client, visits in history.items():
        # The last save keeps at most one state that is older than the second-last checkpoint.
        written = [atomic_files.number_in_name(path) for path in atomic_files.list_checksummed(folder / client)]
        known = [done for done in commits if visits and done <= visits[-1]]
        if not in_memory and len(known) >= 2:
            assert len([number for number in written if number < known[-2]]) <= 1


@pytest.mark.parametrize("kind", [DiskStore, lambda folder: MemoryStore(DiskStore(folder))], ids=["disk", "memory"])
def test_run_resumes_from_the_older_checkpoint_when_the_newest_is_gone(tmp_path: Path, kind: Any) -> None:
    run = toy_run(local_only(), 6, cohort=0.5, min_updates=0)
    availability = Availability(client_dropout=0.2)
    reference = MemoryStore()
    play(run, MODEL, FOUR, store=reference, availability=availability)
    store = kind(tmp_path / "clients")
    for each in rounds(run, MODEL, SimulationEngine(run, MODEL, FOUR, store=store, availability=availability)):
        if each.number in (0, 1, 3, 4):
            store.commit(each.number + 1)
            newest = checkpoint.save(tmp_path / "server", each.number + 1, each.server)
    newest.unlink()
    done, server = checkpoint.load(atomic_files.list_checksummed(tmp_path / "server")[-1])
    assert done == 4
    again = DiskStore(tmp_path / "clients")
    again.rewind(done)
    play(run, MODEL, FOUR, server=server, start=done, store=again, availability=availability)
    for client in FOUR.clients:
        assert tensors.digest(again.load(client, 6).personal) == tensors.digest(reference.load(client, 6).personal)


def test_stateless_method_writes_no_client_files(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    play(toy_run(fedavg(), 2), MODEL, FOUR, store=store)
    store.commit(2)
    assert files_in(tmp_path) == set()
    assert store.known() == []


def test_checkpoint_of_a_run_is_refused_without_its_identity(tmp_path: Path) -> None:
    server = Server({"w": torch.ones(2)}, {}, ParameterVersions({"w": 0}))
    checkpoint.save(tmp_path, 1, server, run="mine")
    with pytest.raises(DamageError, match="belongs to another run"):
        checkpoint.newest(tmp_path, None, server)
    assert checkpoint.newest(tmp_path, "mine", server).done == 1
