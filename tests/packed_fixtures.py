"""Random tensors packed into one buffer per client."""

from __future__ import annotations

from partita.core.packed import PackedTensors, layout_for
from partita.core.tensors import Tensors


def pack_per_client(joined: Tensors) -> list[PackedTensors]:
    layout = layout_for(tuple(joined), tuple(value.shape[1:] for value in joined.values()))
    return layout.per_client(layout.pack(list(joined.values())))
