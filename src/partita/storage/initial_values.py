"""Tensors that still have their initial values: a checkpoint names them instead of storing them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from partita.core import tensors
from partita.core.server_rule import Server
from partita.core.tensors import Tensors


class InitialValueError(ValueError):
    """The initial model is not the one that the run started from."""


class InitialValues:
    """The tensors of the initial server, as far as they have not changed.

    Each tensor is hashed at most once, and a tensor that has changed is released.

    Args:
        server: The server before the first round.
    """

    def __init__(self, server: Server) -> None:
        self._values = flatten(server)
        self._digests: dict[str, str] = {}

    def split(self, current: Mapping[str, torch.Tensor]) -> tuple[Tensors, dict[str, str]]:
        """Separate the tensors that have changed from those that have not.

        Args:
            current: The tensors of a later server, from `flatten`.

        Returns:
            The changed tensors, and the digests of the unchanged ones.
        """
        for name, first in list(self._values.items()):
            value = current.get(name)
            if value is None or not (value is first or tensors.same(value, first.to(value.device))):
                del self._values[name]
            else:
                self._values[name] = value  # the later server's own object, so that the next comparison is immediate
        changed = {name: value for name, value in current.items() if name not in self._values}
        return changed, {name: self._digest(name) for name in self._values}

    def take(self, digests: Mapping[str, str], where: str) -> Tensors:
        """Return the initial values of tensors that a file leaves out.

        Args:
            digests: The digests of these tensors.
            where: The file, for error messages.

        Raises:
            InitialValueError: If a tensor does not exist or has another digest.
        """
        for name, digest in digests.items():
            if name not in self._values or self._digest(name) != digest:
                raise InitialValueError(
                    f"{where} was written with another initial value of '{name}' than the model has now; restore the "
                    "model's files (model.path in config.toml) as they were when the run started, or start a new run"
                )
        return {name: self._values[name] for name in digests}

    def _digest(self, name: str) -> str:
        if name not in self._digests:
            self._digests[name] = tensors.digest({"": self._values[name]})
        return self._digests[name]


def flatten(server: Server) -> Tensors:
    """Return all tensors of a server, as "params/name" and "state/slot/name"."""
    return {
        **{f"params/{name}": value for name, value in server.params.items()},
        **{f"state/{slot}/{name}": value for slot, part in server.state.items() for name, value in part.items()},
    }
