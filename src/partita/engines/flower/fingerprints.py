"""Fingerprints of tensors, to verify that server and site hold the same ones."""

from __future__ import annotations

import hashlib

from torch import Tensor

from partita.core import tensors
from partita.core.tensors import Tensors


class Fingerprints:
    """Computes fingerprints of parameters and caches the digest of each tensor.

    The cache compares tensors by identity, since the server replaces a tensor object whenever its value changes.
    """

    def __init__(self) -> None:
        self.known: dict[str, tuple[Tensor, str]] = {}

    def __call__(self, params: Tensors) -> str:
        whole = hashlib.blake2b(digest_size=16)
        for name, value in sorted(params.items()):
            whole.update(f"{name} {self._one(name, value)} ".encode())
        return whole.hexdigest()

    def _one(self, name: str, value: Tensor) -> str:
        if name not in self.known or self.known[name][0] is not value:
            self.known[name] = (value, tensors.digest({name: value}))
        return self.known[name][1]
