"""Bring an adapter into the form that plain PEFT and plain transformers load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from partita.core.tensors import Tensors
from partita.models import ModelError
from partita.models.adapter_options import FACTORS, AdapterOptions, factor_name
from partita.models.split_qkv import PARTS, SplitQKV

LENGTHS = ".lora_magnitude_vector"  # of DoRA


def merge(module: Any, sites: Sequence[str]) -> None:
    """Add the adapter to the weights and remove PEFT's layers, in place. The old weights are not changed.

    Raises:
        ModelError: If a weight is not stored as numbers.
    """
    for site in sites:
        layer = module.get_submodule(site)
        plain = layer.get_base_layer()
        if not plain.weight.is_floating_point():
            raise ModelError(f"'{site}.weight' is quantized, so nothing can be added to it; use save_pretrained")
        plain.weight = torch.nn.Parameter(plain.weight.detach().clone(), requires_grad=False)
        layer.merge()
        parent, _, name = site.rpartition(".")
        setattr(module.get_submodule(parent), name, plain)


def join(own: Tensors, sites: Sequence[str], options: AdapterOptions) -> Tensors:
    """Put the pieces of LoRA's factors together, and name the lengths of DoRA as PEFT saves them."""
    joined = dict(own)
    for site in sites:
        for dim, factor in enumerate(FACTORS):
            pieces = [joined.pop(factor_name(site, factor, piece)) for piece in options.pieces]
            joined[factor_name(site, factor)] = torch.cat(pieces, dim)
    return {
        name.removesuffix(".weight") if name.endswith(f"{LENGTHS}.weight") else name: joined[name] for name in joined
    }


def fuse(module: torch.nn.Module, sites: Sequence[str], own: Tensors) -> tuple[Tensors, dict[str, int]]:
    """Turn the factors of the parts of a split query-key-value projection into factors of the fused one.

    The A of the parts come below each other. The B of a part has the rows of its outputs, and zeros elsewhere.

    Args:
        module: The module with PEFT's layers.
        sites: The paths of the adapted layers.
        own: The factors by name.

    Returns:
        The factors, and the layers of transformers that have them, each with how many times larger its rank is.
    """
    fused, times = dict(own), dict.fromkeys(sites, 1)
    for path, part in module.named_modules():
        names = [name for name in PARTS if f"{path}.{name}" in times] if isinstance(part, SplitQKV) else []
        if not names or not isinstance(part, SplitQKV):
            continue
        for name in names:
            del times[f"{path}.{name}"]
        times[path] = len(names)
        A, B = ([fused.pop(factor_name(f"{path}.{name}", factor)) for name in names] for factor in FACTORS)
        fused[factor_name(path, FACTORS[0])] = torch.cat(A)
        fused[factor_name(path, FACTORS[1])] = _in_rows(part, dict(zip(names, B, strict=True)))
    return fused, times


def _in_rows(part: SplitQKV, factors: Tensors) -> torch.Tensor:
    """Return the B of a fused projection, (out, number of parts x rank)."""
    columns = []
    for own, B in factors.items():
        rows = [B if name == own else B.new_zeros(count, B.shape[1]) for name, count in part.outputs.items()]
        columns.append(torch.cat(rows))
    joined = torch.cat(columns, 1)
    return joined if part.order is None else joined.index_select(0, part.order.to(joined.device))
