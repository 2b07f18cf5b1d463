"""Parts of a model that compute in float32 while the others compute in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


def compute_in_float32(module: torch.nn.Module, error: BaseException) -> str:
    """Let the part that raised an error compute in float32 from now on, and all parts of its class.

    Args:
        module: The module, changed in place.
        error: The error, with its traceback.

    Returns:
        The name of the part's class; "" if no part raised the error, or if it computes in float32 already.
    """
    part = _innermost_part(module, error)
    if part is None or isinstance(vars(part).get("forward"), _InFloat32):
        return ""
    for each in module.modules():
        if type(each) is type(part):
            each.forward = _InFloat32(each.forward)
    return type(part).__name__


def _innermost_part(module: torch.nn.Module, error: BaseException) -> torch.nn.Module | None:
    """Return the innermost part of a module that ran when an error was raised."""
    while error.__cause__ is not None:
        error = error.__cause__
    parts, trace, found = {*module.modules()}, error.__traceback__, None
    while trace is not None:
        here = trace.tb_frame.f_locals
        found = next((here[name] for name in ("self", "module") if _is_one_of(here.get(name), parts)), found)
        trace = trace.tb_next
    return found


def _is_one_of(value: Any, parts: set[torch.nn.Module]) -> bool:
    return isinstance(value, torch.nn.Module) and value in parts


@dataclass(frozen=True, eq=False)
class _InFloat32:
    """A forward method whose inputs are cast to float32, outside autocast.

    Without autocast, the model computes in bfloat16 throughout, and the outputs are cast back.
    """

    forward: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        device = given[0].device.type if given else "cpu"
        cast_back = not torch.is_autocast_enabled(device) and any(value.dtype == torch.bfloat16 for value in given)
        with torch.autocast(device, enabled=False):
            out = self.forward(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))
        return _cast(out, torch.bfloat16) if cast_back else out


def _cast(part: Any, dtype: torch.dtype) -> Any:
    if isinstance(part, torch.Tensor):
        return part.to(dtype) if part.is_floating_point() else part
    if isinstance(part, Mapping):
        return {name: _cast(value, dtype) for name, value in part.items()}
    return type(part)([_cast(value, dtype) for value in part]) if type(part) in (list, tuple) else part
