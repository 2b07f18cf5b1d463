"""Hand over the objects of a run: data and models that a program holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from partita.core.given import Given, is_given
from partita.core.options import OptionError, format_value
from partita.data.objects import DataSource, from_dataset, from_task
from partita.data.task import Task

SEED = "; new weights, such as a head, are random: call transformers.set_seed first"
ONLY_MODULES = "loss is for a torch.nn.Module; models of transformers have the loss of their task"


def hand_over_data(data: Any) -> tuple[tuple[Given, ...], dict[str, Any], Mapping[str, Any] | None]:
    """Return the objects, the table `[data]`, and the table `[split]` if the data says it."""
    if isinstance(data, Mapping) and isinstance(data.get("name"), str):
        return (), dict(data), None
    if isinstance(data, str | Path):
        raise OptionError(
            f"data is {format_value(str(data))}; say how it is read: {{'name': 'text', 'path': "
            f"{format_value(str(data))}, 'text': COLUMN, 'label': COLUMN}}"
        )
    if isinstance(data, Task):
        data = from_task(data)
    source = data if isinstance(data, DataSource) else from_dataset(data)
    return source.held, dict(source.reading), source.splitting


def hand_over_model_of(model: Any, loss: Any = None) -> tuple[tuple[Given, ...], dict[str, Any]]:
    """Return the object and the table `[model]`."""
    if isinstance(model, str | Path | Mapping):
        if loss is not None:
            raise OptionError(ONLY_MODULES)
        named = isinstance(model, Mapping)
        return (), dict(model) if named else {"name": "pretrained", "path": str(model)}  # type: ignore[arg-type]
    if not isinstance(model, torch.nn.Module):
        raise OptionError(
            f"the model is of type {type(model).__name__}; give a module of transformers, a torch.nn.Module, a folder, "
            "an id on the Hub, or the table [model] as a dict"
        )
    if hasattr(model, "config") and (hasattr(model, "get_base_model") or hasattr(model, "save_pretrained")):
        from partita.models.given_model import hand_over_model

        if loss is not None:
            raise OptionError(ONLY_MODULES)
        given = hand_over_model(model)
        return (given,), {"name": "pretrained", "path": given.name}
    from partita.models.plain import hand_over_module

    given = hand_over_module(model, loss)
    return (given,), {"name": "module", "path": given.name}


def hand_over_again(config: Mapping[str, Any], model: Any, data: Any, loss: Any) -> tuple[Given, ...]:
    """Hand over the objects of a recorded run again.

    Raises:
        OptionError: If they are not those with which the run began.
    """
    held: list[Given] = []
    for what, value, table in (("data", data, config["data"]), ("model", model, config["model"])):
        recorded = table.get("path")
        if value is None or not is_given(recorded):
            continue
        if what == "data":
            objects, made, _ = hand_over_data(value)
        else:
            objects, made = hand_over_model_of(value, loss)
        if made.get("path") != recorded:
            raise OptionError(
                f"the {what} is not the one with which the run began: its digest is {made.get('path', 'none')}, and "
                f"the run's is {recorded}; hand over the same {what}{SEED if what == 'model' else ''}"
            )
        held += objects
    return tuple(held)
