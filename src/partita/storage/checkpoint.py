"""Server checkpoints with checksums: a damaged checkpoint is an error, and a partial one never exists.

A checkpoint also identifies what belongs to it: the run, the records of the completed rounds, and the newest state of
each client. Tensors that still have their initial values are not stored: the checkpoint has their names and digests.

The checkpoint of the best round has a second name in the subfolder `best`, so it stays when newer ones replace it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch

from partita.core import serialization
from partita.core.server_rule import Server
from partita.core.tensors import Tensors
from partita.core.versions import ParameterVersions
from partita.storage.atomic_files import (
    DamageError,
    link_checksummed,
    list_checksummed,
    number_in_name,
    read_checksummed,
    write_checksummed,
)
from partita.storage.initial_values import InitialValueError, InitialValues, flatten

CHECKPOINTS_KEPT = 2  # the older one is a fallback in case the newest is damaged
BEST = "best"  # subfolder
REMEDY = "delete it to resume from the checkpoint before it"
BEST_REMEDY = "restore it from a copy, or delete the folder 'checkpoints' to run all rounds again"

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


def save(
    folder: Path,
    done: int,
    server: Server,
    run: str = "",
    rows: str = "",
    states: States | None = None,
    initial: InitialValues | None = None,
    best: bool = False,
) -> Path:
    """Write a checkpoint after `done` rounds, then delete all but the newest `CHECKPOINTS_KEPT` and the best.

    Args:
        folder: The folder of the checkpoints.
        done: The number of completed rounds.
        server: The server after these rounds.
        run: The identity of the run.
        rows: The digest of the records of the completed rounds.
        states: The newest state of each client.
        initial: The initial values, which are not stored again; None to store all tensors.
        best: Whether this is the best round so far.

    Returns:
        The path of the file.
    """
    changed, unchanged = initial.split(flatten(server)) if initial else (flatten(server), {})
    clients, owners = sorted(server.versions.held), sorted(states or ())
    newest = [states[client] for client in owners] if states else []
    digests = bytearray().join(bytes.fromhex(digest) for _, digest in newest)
    flat: Tensors = {
        **changed,
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
        "unchanged": unchanged,
        "names": list(server.versions.current),
        "clients": clients,
        "owners": None if owners == clients else owners,  # the clients in `states`; usually equal to "clients"
        "preloaded": server.versions.clients_have_initial_model,
    }
    path = write_checksummed(folder, done, serialization.save(flat, {"partita": json.dumps(about)}))
    if best:
        link_checksummed(path, folder / BEST)
    for old in list_checksummed(folder)[:-CHECKPOINTS_KEPT]:
        old.unlink()
    # A run that resumes from the oldest checkpoint needs the best one of that time.
    oldest = number_in_name(list_checksummed(folder)[0])
    for old in [each for each in list_checksummed(folder / BEST) if number_in_name(each) <= oldest][:-1]:
        old.unlink()
    return path


def load(path: Path, device: torch.device | None = None, initial: InitialValues | None = None) -> tuple[int, Server]:
    """Read a checkpoint and return `(completed rounds, server)`."""
    saved = read(path, device, initial=initial)
    return saved.done, saved.server


def read(
    path: Path,
    device: torch.device | None = None,
    like: Server | None = None,
    initial: InitialValues | None = None,
    run: str | None = None,
    remedy: str = REMEDY,
) -> Checkpoint:
    """Read a checkpoint.

    Args:
        path: The file.
        device: The device for the server's tensors; None for the CPU.
        like: If given, the server must have the same names, shapes and types.
        initial: The values of the tensors that the file leaves out; None if it stores all.
        run: If given, the identity of the run that the checkpoint must have.
        remedy: What to do about a damaged file, for the error.

    Raises:
        DamageError: If the file is damaged or does not match.
        InitialValueError: If the initial values are not those of the run.
    """
    data = read_checksummed(path, remedy)
    with _expect_format(path, remedy):
        about = json.loads(serialization.read_metadata(data)["partita"])
        done, owner, unchanged = int(about["done"]), about["run"], dict(about["unchanged"])
    if done != number_in_name(path):
        raise DamageError(f"{path} is a checkpoint of {done} rounds under another name; {remedy}")
    if run is not None and owner != run:
        raise DamageError(f"{path} belongs to another run than the files next to {path.parent}; {remedy}")
    known = initial.take(unchanged, str(path)) if initial else {}
    if missing := unchanged.keys() - known.keys():
        raise InitialValueError(f"{path} does not store '{min(missing)}', which has its initial value; give `initial`")
    with _expect_format(path, remedy):
        saved = _parse(about, {**serialization.load(data), **known}, device)
    if like is not None and _layout(saved.server) != _layout(like):
        raise DamageError(f"{path} is a checkpoint of another model or method; {remedy}")
    return saved


@contextmanager
def _expect_format(path: Path, remedy: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, safetensors.SafetensorError) as error:
        raise DamageError(f"{path} is not a checkpoint of this version of partita; {remedy}") from error


def newest(
    folder: Path,
    run: str | None,
    first: Server,
    device: torch.device | None = None,
    initial: InitialValues | None = None,
) -> Checkpoint:
    """Read the newest checkpoint in a folder.

    Args:
        folder: The folder of checkpoints.
        run: The identity of the run that the checkpoint must have.
        first: The initial server, returned after 0 rounds if there is no checkpoint.
        device: The device for the server's tensors; None for the CPU.
        initial: The values of the tensors that the file leaves out; None if it stores all.

    Raises:
        DamageError: If the checkpoint is damaged or belongs to another run, model or method.
        InitialValueError: If the initial values are not those of the run.
    """
    paths = list_checksummed(folder)
    return read(paths[-1], device, first, initial, run or "") if paths else Checkpoint(0, first)


def best(
    folder: Path,
    run: str | None = None,
    first: Server | None = None,
    device: torch.device | None = None,
    initial: InitialValues | None = None,
) -> Checkpoint | None:
    """Read the checkpoint of the best round.

    Args:
        folder: The folder of checkpoints.
        run: If given, the identity of the run that the checkpoint must have.
        first: If given, the initial server, whose names, shapes and types the checkpoint must have.
        device: The device for the server's tensors; None for the CPU.
        initial: The values of the tensors that the file leaves out; None if it stores all.

    Returns:
        The checkpoint; None if the run has not been evaluated on validation examples.

    Raises:
        DamageError: If the checkpoint is damaged or belongs to another run, model or method.
        InitialValueError: If the initial values are not those of the run.
    """
    paths = list_checksummed(folder / BEST)
    return read(paths[-1], device, first, initial, run, BEST_REMEDY) if paths else None


def rewind_best(folder: Path, done: int, best: int | None) -> None:
    """Delete the best checkpoints of later rounds, and check that the one of round `best` is intact.

    Args:
        folder: The folder of checkpoints.
        done: The number of completed rounds of the checkpoint from which the run resumes.
        best: The number of completed rounds at the best of them; None if there is none.

    Raises:
        DamageError: If the checkpoint is missing or damaged.
    """
    for path in list_checksummed(folder / BEST):
        if number_in_name(path) > done:
            path.unlink()
    if best is None:
        return
    # The run may have been killed after it wrote the checkpoint and before it marked it as the best.
    for path in list_checksummed(folder):
        if number_in_name(path) == best:
            link_checksummed(path, folder / BEST)
    kept = [path for path in list_checksummed(folder / BEST) if number_in_name(path) == best]
    if not kept:
        raise DamageError(f"{folder / BEST} lacks the checkpoint of {best} rounds, the best so far; {BEST_REMEDY}")
    read_checksummed(kept[-1], BEST_REMEDY)


def _parse(about: dict[str, Any], flat: Tensors, device: torch.device | None) -> Checkpoint:
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
