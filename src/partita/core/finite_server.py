"""Whether a round keeps the server's values finite."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from partita.core.server_rule import Server
from partita.core.tensors import Tensors, all_finite


def first_non_finite(before: Server, after: Server) -> str | None:
    """Return the name of a parameter or of server state that the round changed to a non-finite value, or None."""
    moved = _changed(before.params, after.params)
    for slot, part in after.state.items():
        moved |= {f"{slot}/{name}": value for name, value in _changed(before.state.get(slot, {}), part).items()}
    groups: dict[tuple[torch.device, torch.dtype], Tensors] = {}
    for name, value in moved.items():
        if value.is_floating_point() and value.numel():
            groups.setdefault((value.device, value.dtype), {})[name] = value
    for part in groups.values():  # one check per device and dtype: each check synchronizes with the GPU
        if not all_finite(part):
            return next(name for name, value in part.items() if not all_finite({name: value}))
    return None


def _changed(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: value for name, value in after.items() if value is not before.get(name)}
