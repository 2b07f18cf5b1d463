"""Where clients' state lives between visits: on disk by round, or in memory with the disk behind it.

A visit in round r starts from the newest state of an earlier round. So a run that goes back to a checkpoint finds the
states that belong to it, whatever the rounds after it had written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol
from urllib.parse import quote, unquote

import torch

from partita.core import tree, wire
from partita.core.files import number_of, seal, sealed, unseal
from partita.core.learn import ClientState


class Store(Protocol):
    def load(self, client: str, round: int) -> ClientState:
        """The state with which the client enters the round."""
        ...

    def save(self, client: str, round: int, state: ClientState) -> None: ...

    def commit(self, done: int) -> None:
        """A checkpoint of `done` rounds is about to be written: all it needs must be safe now."""
        ...

    def known(self) -> list[str]:
        """The clients that have left anything, sorted."""
        ...


class Disk:
    """One file for each client and round; those that no checkpoint can need any more are dropped at the next visit."""

    def __init__(self, folder: Path, device: torch.device | None = None) -> None:
        self.folder, self.device = folder, device or torch.device("cpu")
        self.commits = (0, 0)  # the rounds behind the last two checkpoints: both must stay usable

    def load(self, client: str, round: int) -> ClientState:
        earlier = [path for path in sealed(self._folder(client)) if number_of(path) < round]
        if not earlier:
            return ClientState()
        slots = wire.unpack(unseal(earlier[-1], f"restore this state of client '{client}' from a copy, or start anew"))
        slots = {slot: tree.to(part, self.device) for slot, part in slots.items()}
        return ClientState(slots.pop("personal", {}), slots)

    def save(self, client: str, round: int, state: ClientState) -> None:
        folder = self._folder(client)
        seal(folder, round, wire.pack({"personal": state.personal, **state.memory}))
        for old in [path for path in sealed(folder) if number_of(path) < self.commits[0]][:-1]:
            old.unlink()

    def commit(self, done: int) -> None:
        self.commits = (self.commits[1], done)

    def known(self) -> list[str]:
        return sorted(unquote(path.name) for path in self.folder.glob("*") if sealed(path))

    def rewind(self, done: int) -> None:
        """Forget what rounds from `done` on had written."""
        for path in self.folder.glob("*/*.safetensors"):
            if number_of(path) >= done:
                path.unlink()

    def _folder(self, client: str) -> Path:
        return self.folder / quote(client, safe="").replace(".", "%2E")  # a client may be called ".."


class Memory:
    """States in memory; with a disk behind it, each commit writes those that changed."""

    def __init__(self, disk: Disk | None = None) -> None:
        self.disk = disk
        self.states: dict[str, tuple[int, ClientState]] = {}
        self.changed: set[str] = set()

    def load(self, client: str, round: int) -> ClientState:
        if client in self.states:
            return self.states[client][1]
        return self.disk.load(client, round) if self.disk else ClientState()

    def save(self, client: str, round: int, state: ClientState) -> None:
        self.states[client] = (round, state)
        self.changed.add(client)

    def commit(self, done: int) -> None:
        if self.disk:
            for client in sorted(self.changed):
                self.disk.save(client, *self.states[client])
            self.disk.commit(done)
        self.changed.clear()

    def known(self) -> list[str]:
        return sorted(self.states.keys() | set(self.disk.known() if self.disk else ()))
