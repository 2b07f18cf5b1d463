"""Whether both sides mean the same tensors: a fingerprint instead of trust in what each believes the other holds."""

from __future__ import annotations

import hashlib

from torch import Tensor

from partita.core import tensors
from partita.core.tensors import Tensors


class Fingerprints:
    """Fingerprints of parameters, each tensor read once: the server's stay the same objects until they change."""

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
