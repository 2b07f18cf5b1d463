"""Functions of torch that a module of transformers calls by their full names, replaced for that module alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.nn import functional

from partita.models.attention import scaled_dot_product

Function = Callable[..., Any]


def use_own_functions(module: torch.nn.Module) -> None:
    """Let modules that call torch's fused attention or bicubic interpolation compute these differently, in place.

    - Attention goes through `scaled_dot_product`, which is fast under vmap and keeps the autocast dtype there.
    - Position embeddings are resized by matrix products: on a GPU, the gradient of torch's own function has no
      deterministic kernel.
    """
    for part in module.modules():
        if "scaled_dot_product_attention" in _names(type(part), "forward"):
            _replace(part, "forward", "scaled_dot_product_attention", _attention)
        if "interpolate" in _names(type(part), "interpolate_pos_encoding"):
            _replace(part, "interpolate_pos_encoding", "interpolate", resized)


def _names(kind: type, method: str) -> tuple[str, ...]:
    """The names that the code of a method reads; none if the class has no such method."""
    code = getattr(inspect.unwrap(getattr(kind, method, _names)), "__code__", None)
    return code.co_names if code and hasattr(kind, method) else ()


def _replace(part: torch.nn.Module, method: str, name: str, function: Function) -> None:
    """Give a module a copy of its method in which `torch.nn.functional.name` is `function`."""
    own: Any = inspect.unwrap(getattr(type(part), method))
    known = {id(each): _with_function(each, name, function) for each in (torch, torch.nn, functional)}
    names = {key: known.get(id(value), value) for key, value in own.__globals__.items()}
    copy = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    copy.__kwdefaults__ = own.__kwdefaults__
    setattr(part, method, MethodType(copy, part))


@cache
def _with_function(package: ModuleType, name: str, function: Function) -> ModuleType:
    """Return a copy of torch, torch.nn or torch.nn.functional in which a function is replaced."""
    copy = ModuleType(package.__name__)
    vars(copy).update(vars(package))
    if package is torch:
        copy.nn = _with_function(torch.nn, name, function)  # type: ignore[attr-defined]
    elif package is torch.nn:
        copy.functional = _with_function(functional, name, function)  # type: ignore[attr-defined]
    else:
        setattr(copy, name, function)
    return copy


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` by `scaled_dot_product`."""
    if dropout_p or query.ndim != 4:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None:
        attn_mask = attn_mask.view(*[1] * (4 - attn_mask.ndim), *attn_mask.shape)
    if torch.is_autocast_enabled(query.device.type):  # under vmap, autocast misses this function
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    return scaled_dot_product(query, key, value, attn_mask, scale, is_causal)


def resized(value: torch.Tensor, size: tuple[int, int], mode: str = "nearest", **options: Any) -> torch.Tensor:
    """`torch.nn.functional.interpolate` by a matrix product for each of the two dimensions.

    Args:
        value: (example, channel, row, column).
        size: The number of rows and of columns of the result.
        mode: As in torch.
        **options: As in torch. `scale_factor` is not supported.
    """
    rows, columns = (
        _weights(before, int(after), mode, tuple(sorted(options.items())), value.device)
        for before, after in zip(value.shape[-2:], size, strict=True)
    )
    with torch.autocast(value.device.type, enabled=False):
        return rows.to(value.dtype) @ value @ columns.T.to(value.dtype)


@cache
@torch.inference_mode(False)  # or they could not be used in training
def _weights(
    before: int, after: int, mode: str, options: tuple[tuple[str, Any], ...], device: torch.device
) -> torch.Tensor:
    """Return the weights of `before` points in each of `after` points, (after, before)."""
    units = torch.eye(before).view(1, 1, before, before)  # each column has one point
    return functional.interpolate(units, (after, before), mode=mode, **dict(options))[0, 0].to(device)
