"""What the tests of compression share."""

from __future__ import annotations

from dataclasses import replace

import torch
from helpers import Clients
from torch import Tensor

from partita.core import serialization
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.core.update import Update
from partita.core.update_transform import UpdateTransform
from partita.testing.toy import ToyTransformer

WIDE_MODEL = ToyTransformer(width=36, layers=2)  # its matrices have 1,296 numbers
FOUR = Clients(a=5, b=6, c=7, d=8)


def random_normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=(Key(seed) / "draw").generator())


def make_update(delta: Tensors, **slots: Tensors) -> Update:
    return Update("a", delta, slots, 1.0, dict.fromkeys(delta, 1), None)


def encode_and_decode(transform: UpdateTransform, update: Update, key: Key = Key(0)) -> tuple[Update, Update]:  # noqa: B008
    """Encoded and packed for real, and opened."""
    sent, remembered = transform.encode(update, {}, key)
    assert remembered == {}
    slots = serialization.unpack(serialization.pack({"delta": sent.delta, **sent.slots}))
    assert sum(serialization.byte_counts({"delta": sent.delta, **sent.slots}).values()) == len(
        serialization.pack({"delta": sent.delta, **sent.slots})
    )
    return sent, transform.decode_update(replace(update, delta=slots.pop("delta"), slots=slots))
