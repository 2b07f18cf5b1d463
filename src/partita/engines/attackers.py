"""Simulated attackers: clients that change their update, or their labels, before the server sees it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from partita.core.method import Method
from partita.core.rng import Key
from partita.core.settings import AttackKind
from partita.core.tensors import Names, Slots, scale, upcast
from partita.core.update import Update
from partita.core.update_transform import UpdateTransform


@dataclass(frozen=True)
class Attack(UpdateTransform):
    """Changes the updates of the attackers after training, before any other transform.

    Attributes:
        kind: "sign-flip" sends -strength times the update, "scale" strength times the update, "noise" Gaussian noise
            with strength times its norm. "examples" claims strength times as many training examples.
        attackers: The clients that attack. All others send what they trained.
        strength: How strong the attack is.
    """

    kind: AttackKind
    attackers: Names
    strength: float

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        if update.client not in self.attackers:
            return update, {}
        if self.kind == "examples":
            return replace(update, weight=update.weight * self.strength), {}
        if self.kind == "noise":
            return replace(update, delta=_noise_like(update, self.strength, key)), {}
        factor = self.strength if self.kind == "scale" else -self.strength
        slots = {slot: scale(part, factor) for slot, part in update.slots.items()}
        return replace(update, delta=scale(update.delta, factor), slots=slots), {}


def _noise_like(update: Update, strength: float, key: Key) -> dict[str, torch.Tensor]:
    """Return noise for every name of the update. Its expected norm over all names is `strength` times the update's."""
    square = math.fsum(float(upcast(value).square().sum()) for value in update.delta.values())
    size = sum(value.numel() for value in update.delta.values())
    deviation = strength * math.sqrt(square / max(1, size))
    noise = {}
    for name, value in update.delta.items():
        drawn = torch.randn(value.shape, generator=(key / name).generator())
        noise[name] = (deviation * drawn).to(value.device, value.dtype)
    return noise


def choose_attackers(clients: Sequence[str], attackers: float, key: Key) -> Names:
    """Draw the attackers once for the whole run.

    Args:
        clients: All clients.
        attackers: A number of clients as an int, or a fraction as a float. A fraction is rounded down.
        key: The random key of the draw.

    Raises:
        ValueError: If there are fewer clients.
    """
    count = attackers if isinstance(attackers, int) else math.floor(attackers * len(clients))
    if count > len(clients):
        raise ValueError(
            f"federation.attackers is {attackers}, but there are {len(clients)} clients; set it to at most that number"
        )
    return frozenset(key.sample(clients, count))


def add_attack(method: Method, kind: AttackKind, attackers: Names, strength: float) -> Method:
    """Return the method with attackers among its clients. Flipped labels are in the data, not here."""
    if kind == "label-flip" or not attackers:
        return method
    return replace(method, transforms=(Attack(kind, attackers, strength), *method.transforms))
