"""The server's state on disk, sealed: a damaged checkpoint is an error, and a partial one never exists.

A checkpoint also says what belongs to it: the run, the rows of the rounds done, and the newest state of each client.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch

from partita.core import serialization
from partita.core.atomic_files import DamageError, list_checksummed, number_in_name, read_checksummed, write_checksummed
from partita.core.method import Server
from partita.core.tensors import Tensors
from partita.core.versions import ParameterVersions

CHECKPOINTS_KEPT = 2  # checkpoints; the older one is there in case the newest is damaged
REMEDY = "delete it to resume from the checkpoint before it"

States = Mapping[str, tuple[int, str]]  # by client, the round and the digest of its newest state


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it was read."""

    done: int
    server: Server
    run: str = ""  # the run's identity
    rows: str = ""  # the digest of the rows of the rounds done
    states: States = field(default_factory=dict)


def save(folder: Path, done: int, server: Server, run: str = "", rows: str = "", states: States | None = None) -> Path:
    """Write the server after `done` rounds, then drop all but the newest few."""
    clients, owners = sorted(server.versions.held), sorted(states or ())
    newest = [states[client] for client in owners] if states else []
    digests = bytearray().join(bytes.fromhex(digest) for _, digest in newest)
    flat: Tensors = {
        **{f"params/{name}": value for name, value in server.params.items()},
        **{f"state/{slot}/{name}": value for slot, part in server.state.items() for name, value in part.items()},
        "ledger/versions": torch.tensor(list(server.versions.current.values()), dtype=torch.int32),
        "ledger/held": torch.tensor([server.versions.held[client] for client in clients], dtype=torch.int32),
        "clients/round": torch.tensor([round for round, _ in newest], dtype=torch.int32),
        "clients/digest": torch.frombuffer(digests, dtype=torch.uint8)
        if digests
        else torch.empty(0, dtype=torch.uint8),
    }
    about = {
        "done": done,
        "run": run,
        "rows": rows,
        "params": list(server.params),  # a file does not keep their order, nor slots that are empty
        "state": {slot: list(part) for slot, part in server.state.items()},
        "names": list(server.versions.current),
        "clients": clients,
        "owners": None if owners == clients else owners,  # of a state; mostly all clients
        "preloaded": server.versions.clients_have_initial_model,
    }
    path = write_checksummed(folder, done, serialization.save(flat, {"partita": json.dumps(about)}))
    for old in list_checksummed(folder)[:-CHECKPOINTS_KEPT]:
        old.unlink()
    return path


def load(path: Path, device: torch.device | None = None) -> tuple[int, Server]:
    """(rounds done, server)."""
    saved = read(path, device)
    return saved.done, saved.server


def read(path: Path, device: torch.device | None = None, like: Server | None = None) -> Checkpoint:
    """With `like`, the server must have its names and shapes."""
    data = read_checksummed(path, REMEDY)
    try:
        saved = _parse(data, device)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, safetensors.SafetensorError) as error:
        raise DamageError(f"{path} is not a checkpoint of this version of partita; {REMEDY}") from error
    if saved.done != number_in_name(path):
        raise DamageError(f"{path} is a checkpoint of {saved.done} rounds under another name; {REMEDY}")
    if like is not None and _layout(saved.server) != _layout(like):
        raise DamageError(f"{path} is a checkpoint of another model or method; {REMEDY}")
    return saved


def newest(folder: Path, run: str | None, first: Server, device: torch.device | None = None) -> Checkpoint:
    """The newest checkpoint, which must be of the run with this identity; where there is none, its first server."""
    found = list_checksummed(folder)
    if not found:
        return Checkpoint(0, first)
    saved = read(found[-1], device, first)
    if saved.run != run:
        raise DamageError(f"{found[-1]} belongs to another run than the files beside {folder}; {REMEDY}")
    return saved


def _parse(data: bytes, device: torch.device | None) -> Checkpoint:
    about = json.loads(serialization.read_metadata(data)["partita"])
    flat = safetensors.torch.load(data)
    digests = flat.pop("clients/digest").numpy().tobytes()
    rounds = flat.pop("clients/round").tolist()
    flat = {key: value.to(device or "cpu") for key, value in flat.items()}
    params = {name: flat[f"params/{name}"] for name in about["params"]}
    state = {slot: {name: flat[f"state/{slot}/{name}"] for name in names} for slot, names in about["state"].items()}
    versions = dict(zip(about["names"], flat["ledger/versions"].tolist(), strict=True))
    rows = [tuple(row) for row in flat["ledger/held"].tolist()]
    shared = {row: row for row in rows}
    held = {client: shared[row] for client, row in zip(about["clients"], rows, strict=True)}
    owners = about["clients"] if about["owners"] is None else about["owners"]
    places = range(0, len(digests), 16)
    newest = zip(rounds, (digests[place : place + 16].hex() for place in places), strict=True)
    states = dict(zip(owners, newest, strict=True))
    server = Server(params, state, ParameterVersions(versions, held, about["preloaded"]))
    return Checkpoint(int(about["done"]), server, about["run"], about["rows"], states)


def _layout(server: Server) -> object:
    """What two servers of one run have in common."""
    params = {name: (value.shape, value.dtype) for name, value in server.params.items()}
    return params, sorted(server.versions.current), server.versions.clients_have_initial_model
