"""A whole round of the secure-aggregation protocol in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from torch import Tensor

from partita.core.secure_settings import SecureAggregation
from partita.core.update import Update
from partita.secure_aggregation.client import SecureClient
from partita.secure_aggregation.fixed_point import FixedPoint, Layout
from partita.secure_aggregation.round_setup import RoundSetup
from partita.secure_aggregation.server import SecureServer

LAYOUT = Layout((("delta", "a", (3, 2)), ("delta", "b", (4,)), ("control", "b", (4,))), True)
SORTED = replace(LAYOUT, entries=tuple(sorted(LAYOUT.entries)))


def names(count: int) -> list[str]:
    return [f"c{place:03}" for place in range(count)]


def setup_for(count: int, settings: SecureAggregation | None = None, round_id: bytes = b"run/0") -> RoundSetup:
    settings = settings or SecureAggregation()
    return RoundSetup(settings, round_id, SORTED, FixedPoint(settings.bits, count, 1000.0, settings.max_value))


def random_vector(setup: RoundSetup, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(setup.dtype)
    return torch.randint(info.min, info.max, (setup.layout.length,), generator=generator, dtype=setup.dtype)


def random_update(client: str, seed: int, weight: float = 10.0) -> Update:
    generator = torch.Generator().manual_seed(seed)
    draw = {(slot, name): torch.randn(shape, generator=generator) for slot, name, shape in SORTED.entries}
    delta = {name: value for (slot, name), value in draw.items() if slot == "delta"}
    slots = {"control": {name: value for (slot, name), value in draw.items() if slot == "control"}}
    return Update(client, delta, slots, weight, dict.fromkeys(delta, 1), float(seed % 7))


def share_stage(setup: RoundSetup, clients: Collection[str]) -> tuple[SecureServer, dict[str, SecureClient]]:
    """The server and the clients after the first three stages."""
    server, all_clients = SecureServer(setup), {name: SecureClient(setup, name) for name in clients}
    for name, client in all_clients.items():
        server.add_advertisement(name, client.advertise())
    for name, client in all_clients.items():
        server.add_shares(name, client.share_keys(server.roster()))
    check_stage(server, all_clients)
    return server, all_clients


def check_stage(server: SecureServer, clients: Mapping[str, SecureClient]) -> None:
    for name, client in clients.items():
        server.add_checked(name, client.check(server.inbox(name)))


def mask_stage(
    setup: RoundSetup, vectors: Mapping[str, Tensor], dropped: Collection[str] = ()
) -> tuple[SecureServer, dict[str, SecureClient], dict[str, bytes]]:
    """The server and the clients after the fourth stage, and the masked vectors as the server saw them."""
    server, clients = share_stage(setup, vectors)
    seen = {name: clients[name].mask(server.present(), vectors[name]) for name in vectors if name not in dropped}
    for name, message in seen.items():
        server.add_masked(name, message)
    return server, clients, seen


def run_protocol(
    setup: RoundSetup, vectors: Mapping[str, Tensor], dropped: Collection[str] = (), silent: Collection[str] = ()
) -> SecureServer:
    """All six stages. `dropped` clients leave before the masked input, `silent` ones before they unmask."""
    server, clients, _ = mask_stage(setup, vectors, dropped)
    confirm_stage(server, clients)
    unmask_stage(server, clients, silent)
    return server


def confirm_stage(server: SecureServer, clients: Mapping[str, SecureClient]) -> None:
    for name in server.survivors:
        server.add_confirmed(name, clients[name].confirm(server.lists()))


def unmask_stage(server: SecureServer, clients: Mapping[str, SecureClient], silent: Collection[str] = ()) -> None:
    for name in server.survivors:
        if name not in silent:
            server.add_unmasked(name, clients[name].unmask(server.signatures()))


def write_ssh_keys(folder: Path, clients: Iterable[str], kind: str) -> dict[str, str]:
    """Write a private SSH key for each client, as `ssh-keygen` does, and return the public ones."""
    public = {}
    for name in clients:
        curve = {"p384": ec.SECP384R1, "p256": ec.SECP256R1}.get(kind)
        key: Any = ec.generate_private_key(curve()) if curve else ed25519.Ed25519PrivateKey.generate()
        form = serialization.PrivateFormat.OpenSSH
        (folder / name).write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
        encoded = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        public[name] = key.public_key().public_bytes(*encoded).decode()
    return public
