"""References for DP-SGD that several tests compare with."""

from __future__ import annotations

import torch

from partita.core.data import Batch
from partita.core.model import Model
from partita.core.tensors import Tensors


def micro_batch_sum(model: Model, params: Tensors, batch: Batch, clip: float) -> Tensors:
    """The plain loop: one example, one backward pass, one clipping."""
    total = {name: torch.zeros_like(value) for name, value in params.items()}
    for place in range(len(batch.targets)):
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        one = {name: value[place : place + 1] for name, value in batch.inputs.items()}
        model.losses(model(leaves, one), batch.targets[place : place + 1]).sum().backward()
        slopes = {name: leaf.grad for name, leaf in leaves.items()}
        norm = torch.sqrt(sum((slope**2).sum() for slope in slopes.values()))  # type: ignore[union-attr, arg-type, operator]
        for name, slope in slopes.items():
            total[name] += slope * min(1.0, clip / float(norm))  # type: ignore[operator]
    return total
