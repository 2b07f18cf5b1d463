"""The server's state on disk, sealed: a damaged checkpoint is an error, and a partial one never exists."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
import torch

from partita.core import wire
from partita.core.files import seal, sealed, unseal
from partita.core.ledger import Ledger
from partita.core.method import Server
from partita.core.tree import Tensors

KEPT = 2  # checkpoints; the older one is there in case the newest is damaged


def save(folder: Path, done: int, server: Server) -> Path:
    """Write the server after `done` rounds, then drop all but the newest few."""
    clients = sorted(server.ledger.held)
    flat: Tensors = {
        **{f"params/{name}": value for name, value in server.params.items()},
        **{f"state/{slot}/{name}": value for slot, part in server.state.items() for name, value in part.items()},
        "ledger/versions": torch.tensor(list(server.ledger.versions.values()), dtype=torch.int32),
        "ledger/held": torch.tensor([server.ledger.held[client] for client in clients], dtype=torch.int32),
    }
    about = {
        "done": done,
        "params": list(server.params),  # a file does not keep their order, nor slots that are empty
        "state": {slot: list(part) for slot, part in server.state.items()},
        "names": list(server.ledger.versions),
        "clients": clients,
        "preloaded": server.ledger.preloaded,
    }
    path = seal(folder, done, wire.save(flat, {"partita": json.dumps(about)}))
    for old in sealed(folder)[:-KEPT]:
        old.unlink()
    return path


def load(path: Path, device: torch.device | None = None) -> tuple[int, Server]:
    """(rounds done, server)."""
    data = unseal(path, "delete it to resume from the checkpoint before it")
    length = int.from_bytes(data[:8], "little")
    about = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["partita"])
    flat = {key: value.to(device or "cpu") for key, value in safetensors.torch.load(data).items()}
    params = {name: flat[f"params/{name}"] for name in about["params"]}
    state = {slot: {name: flat[f"state/{slot}/{name}"] for name in names} for slot, names in about["state"].items()}
    versions = dict(zip(about["names"], flat["ledger/versions"].tolist(), strict=True))
    rows = [tuple(row) for row in flat["ledger/held"].tolist()]
    shared = {row: row for row in rows}
    held = {client: shared[row] for client, row in zip(about["clients"], rows, strict=True)}
    return about["done"], Server(params, state, Ledger(versions, held, about["preloaded"]))
