"""Storage of client state between rounds: on disk by round, or in memory with optional disk backing.

A client enters round r with its newest state from an earlier round. So a run that resumes from a checkpoint finds the
states that belong to it, even if later rounds had written newer ones. A file has only the shapes of tensors that are
zero, as the memory of a rule is for all parameters that the client never trained.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch

from partita.core import memory, serialization
from partita.core.client import ClientState
from partita.core.serialization import DTYPES, code_of
from partita.core.tensors import Slots, Tensors, all_zero
from partita.storage.atomic_files import (
    DamageError,
    checksummed_name,
    digest_in_name,
    list_checksummed,
    number_in_name,
    read_checksummed,
    write_checksummed,
)
from partita.storage.checkpoint import States
from partita.storage.safe_text import client_of_folder, path_component


class ClientStore(Protocol):
    """Stores client state between rounds."""

    def load(self, client: str, round: int) -> ClientState:
        """Return the state with which the client enters the round; an empty state before its first."""
        ...

    def save(self, client: str, round: int, state: ClientState) -> None:
        """Store the state with which the client leaves the round."""
        ...

    def commit(self, done: int, best: int | None = None) -> None:
        """Make durable all that a checkpoint of `done` rounds needs. Called just before the checkpoint is written.

        Args:
            done: The number of completed rounds.
            best: The number of completed rounds at the best checkpoint so far, which must stay usable too.
        """
        ...

    def known(self) -> list[str]:
        """Return the clients with a stored state, sorted."""
        ...

    def states(self) -> States:
        """Return the newest states on this machine after a commit, as a checkpoint records them."""
        ...


class DiskStore:
    """Stores one file per client and round. Files that no checkpoint needs any more are deleted at the next save.

    Args:
        folder: The folder; each client has a subfolder.
        device: The device for loaded tensors; None for the CPU.
        newest: The newest states according to a checkpoint. Other files are then ignored, and a missing or replaced
            file is an error. If None, any file in the folder is accepted.
    """

    def __init__(self, folder: Path, device: torch.device | None = None, newest: States | None = None) -> None:
        self.folder, self.device = folder, device
        self.commits = (0, 0)  # completed rounds at the last two checkpoints: both must stay usable
        self.bests: tuple[int | None, int | None] = (None, None)  # the best checkpoint at the time of each
        self.newest = None if newest is None else dict(newest)

    def load(self, client: str, round: int) -> ClientState:
        path = self._earlier(client, round)
        if path is None:
            return ClientState()
        remedy = f"restore this state of client '{client}' from a copy, or start a new run"
        try:
            slots = _unpack(read_checksummed(path, remedy))
        except FileNotFoundError as error:
            raise self._missing(client, path) from error
        except DamageError:
            raise
        except (ValueError, TypeError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
            raise DamageError(f"{path} is not a state of this version of partita; {remedy}") from error
        moved = {slot: {name: value.to(self.device) for name, value in part.items()} for slot, part in slots.items()}
        return ClientState(moved.pop("personal", {}), moved)

    def _earlier(self, client: str, round: int) -> Path | None:
        if self.newest is not None:
            if client not in self.newest:
                return None
            number, digest = self.newest[client]
            if number < round:
                return self._folder(client) / checksummed_name(number, digest)
        return _newest_before(list_checksummed(self._folder(client)), round)

    def save(self, client: str, round: int, state: ClientState) -> None:
        folder = self._folder(client)
        path = write_checksummed(
            folder,
            round,
            _pack({"personal": state.personal, **state.memory}, client),
        )
        if self.newest is not None:
            self.newest[client] = round, digest_in_name(path)
        paths = list_checksummed(folder)
        needed = {_newest_before(paths, done) for done in self.bests if done is not None}
        for old in [path for path in paths if number_in_name(path) < self.commits[0]][:-1]:
            if old not in needed:
                old.unlink()

    def commit(self, done: int, best: int | None = None) -> None:
        self.commits, self.bests = (self.commits[1], done), (self.bests[1], best)

    def known(self) -> list[str]:
        if self.newest is not None:
            return sorted(self.newest)
        return sorted(self._owner(path) for path in self.folder.glob("*") if list_checksummed(path))

    def states(self) -> States:
        return self.newest or {}

    def rewind(self, done: int) -> None:
        """Delete the states of round `done` and later, and check that all states in the checkpoint exist.

        Raises:
            DamageError: If a state that the checkpoint names is missing.
        """
        existing = set[Path]()
        for folder in self.folder.glob("*"):
            for path in list_checksummed(folder):
                if number_in_name(path) >= done:
                    path.unlink()
                else:
                    existing.add(path)
        for client, (number, digest) in (self.newest or {}).items():
            path = self._folder(client) / checksummed_name(number, digest)
            if path not in existing:
                raise self._missing(client, path)

    def _missing(self, client: str, path: Path) -> DamageError:
        return DamageError(
            f"{path} is missing: it is the state of client '{client}' that belongs to the checkpoint; restore it from "
            "a copy, or delete the folder 'checkpoints' to run all rounds again"
        )

    def _owner(self, folder: Path) -> str:
        """The client of a folder. A shortened folder name has only a digest, so read the name from a state file."""
        name = client_of_folder(folder.name)
        if name is None:
            name = str(_about(read_checksummed(list_checksummed(folder)[-1], "restore it from a copy"))["client"])
        return name

    def _folder(self, client: str) -> Path:
        return self.folder / path_component(client)


def _newest_before(paths: list[Path], round: int) -> Path | None:
    return next((path for path in reversed(paths) if number_in_name(path) < round), None)


def _pack(slots: Slots, client: str) -> bytes:
    stored: dict[str, Tensors] = {}
    zeros: list[tuple[str, str, str, list[int]]] = []
    for slot, part in slots.items():
        for name, value in part.items():
            if (code := code_of(value.dtype)) and all_zero(value):
                zeros.append((slot, name, code, list(value.shape)))
            else:
                stored.setdefault(slot, {})[name] = value
    # One entry: the order of several would differ from file to file, and with it the digest.
    return serialization.pack(stored, {"partita": json.dumps({"client": client, "zeros": sorted(zeros)})})


def _about(data: bytes) -> dict[str, Any]:
    """Return the client of a state, and the tensors that are zero."""
    about: dict[str, Any] = json.loads(serialization.read_metadata(data)["partita"])
    return about


def _unpack(data: bytes) -> dict[str, Tensors]:
    slots = serialization.unpack(data)
    types = {code: getattr(torch, name) for name, code in DTYPES.items()}
    zeros = _about(data)["zeros"]
    total = sum(math.prod(shape) * types[code].itemsize for _, _, code, shape in zeros)
    memory.require(total, "the state", "it promises more zeros than a client can have")
    for slot, name, code, shape in zeros:
        slots.setdefault(slot, {})[name] = torch.zeros(shape, dtype=types[code])
    # In the order of `serialization.unpack`, on which sums depend.
    return {slot: dict(sorted(slots[slot].items())) for slot in sorted(slots)}


class MemoryStore:
    """Stores states in memory. With a `disk` store, each commit writes the states that changed."""

    def __init__(self, disk: DiskStore | None = None) -> None:
        self.disk = disk
        self.held: dict[str, tuple[int, ClientState]] = {}
        self.changed: set[str] = set()

    def load(self, client: str, round: int) -> ClientState:
        if client in self.held:
            return self.held[client][1]
        return self.disk.load(client, round) if self.disk else ClientState()

    def save(self, client: str, round: int, state: ClientState) -> None:
        self.held[client] = (round, state)
        self.changed.add(client)

    def commit(self, done: int, best: int | None = None) -> None:
        if self.disk:
            for client in sorted(self.changed):
                self.disk.save(client, *self.held[client])
            self.disk.commit(done, best)
        self.changed.clear()

    def known(self) -> list[str]:
        return sorted(self.held.keys() | set(self.disk.known() if self.disk else ()))

    def states(self) -> States:
        return self.disk.states() if self.disk else {}
