"""Fingerprints of tensors, to verify that server and site hold the same ones."""

from __future__ import annotations

import hashlib

import torch

from partita.core import tensors
from partita.core.tensors import Tensors


class Fingerprints:
    """Computes fingerprints of parameters and caches the digest of each tensor.

    The cache compares tensors by identity, since the server replaces a tensor object whenever its value changes.
    """

    def __init__(self) -> None:
        self.cache: dict[str, tuple[torch.Tensor, str]] = {}

    def __call__(self, params: Tensors) -> str:
        hasher = hashlib.blake2b(digest_size=16)
        for name, value in sorted(params.items()):
            hasher.update(f"{name} {self._digest(name, value)} ".encode())
        return hasher.hexdigest()

    def _digest(self, name: str, value: torch.Tensor) -> str:
        if name not in self.cache or self.cache[name][0] is not value:
            self.cache[name] = (value, tensors.digest({name: value}))
        return self.cache[name][1]
