"""Server checkpoints with checksums: a damaged checkpoint is an error, and a partial one never exists.

A checkpoint also identifies what belongs to it: the run, the records of the completed rounds, and the newest state of
each client.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch

from partita.core import serialization
from partita.core.method import Server
from partita.core.tensors import Tensors
from partita.core.versions import ParameterVersions
from partita.storage.atomic_files import (
    DamageError,
    list_checksummed,
    number_in_name,
    read_checksummed,
    write_checksummed,
)

CHECKPOINTS_KEPT = 2  # the older one is a fallback in case the newest is damaged
REMEDY = "delete it to resume from the checkpoint before it"

States = Mapping[str, tuple[int, str]]  # by client, the round and the digest of its newest state file


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        done: The number of completed rounds.
        server: The server after these rounds.
        run: The identity of the run.
        rows: The digest of the records of the completed rounds.
        states: The newest state of each client.
    """

    done: int
    server: Server
    run: str = ""
    rows: str = ""
    states: States = field(default_factory=dict)


def save(folder: Path, done: int, server: Server, run: str = "", rows: str = "", states: States | None = None) -> Path:
    """Write a checkpoint after `done` rounds, then delete all but the newest `CHECKPOINTS_KEPT`.

    Args:
        folder: The folder of the checkpoints.
        done: The number of completed rounds.
        server: The server after these rounds.
        run: The identity of the run.
        rows: The digest of the records of the completed rounds.
        states: The newest state of each client.

    Returns:
        The path of the file.
    """
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
        "params": list(server.params),  # safetensors keeps neither the order of names nor empty slots
        "state": {slot: list(part) for slot, part in server.state.items()},
        "names": list(server.versions.current),
        "clients": clients,
        "owners": None if owners == clients else owners,  # the clients in `states`; usually equal to "clients"
        "preloaded": server.versions.clients_have_initial_model,
    }
    path = write_checksummed(folder, done, serialization.save(flat, {"partita": json.dumps(about)}))
    for old in list_checksummed(folder)[:-CHECKPOINTS_KEPT]:
        old.unlink()
    return path


def load(path: Path, device: torch.device | None = None) -> tuple[int, Server]:
    """Read a checkpoint and return `(completed rounds, server)`."""
    saved = read(path, device)
    return saved.done, saved.server


def read(path: Path, device: torch.device | None = None, like: Server | None = None) -> Checkpoint:
    """Read a checkpoint.

    Args:
        path: The file.
        device: The device for the server's tensors; None for the CPU.
        like: If given, the server must have the same names, shapes and types.

    Raises:
        DamageError: If the file is damaged or does not match.
    """
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
    """Read the newest checkpoint in a folder.

    Args:
        folder: The folder of checkpoints.
        run: The identity of the run that the checkpoint must have.
        first: The initial server, returned after 0 rounds if there is no checkpoint.
        device: The device for the server's tensors; None for the CPU.

    Raises:
        DamageError: If the checkpoint is damaged or belongs to another run, model or method.
    """
    paths = list_checksummed(folder)
    if not paths:
        return Checkpoint(0, first)
    saved = read(paths[-1], device, first)
    if saved.run != run:
        raise DamageError(f"{paths[-1]} belongs to another run than the files next to {folder}; {REMEDY}")
    return saved


def _parse(data: bytes, device: torch.device | None) -> Checkpoint:
    about = json.loads(serialization.read_metadata(data)["partita"])
    flat = safetensors.torch.load(data)
    digests = flat["clients/digest"].numpy().tobytes()
    rounds = flat["clients/round"].tolist()
    params = {name: flat[f"params/{name}"].to(device) for name in about["params"]}
    state = {
        slot: {name: flat[f"state/{slot}/{name}"].to(device) for name in names}
        for slot, names in about["state"].items()
    }
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
    """What all servers of one run have in common."""
    params = {name: (value.shape, value.dtype) for name, value in server.params.items()}
    return params, sorted(server.versions.current), server.versions.clients_have_initial_model
