"""Hand over the objects of a run: data and models that a program holds."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from partita.core.given import Given, is_given
from partita.core.options import OptionError, format_value
from partita.core.own_code import CodeError, Reference, load_module, load_object, read_fit_call
from partita.core.registry import find_reference
from partita.data.objects import DataSource, as_long_as_taken, from_dataset, from_task
from partita.data.task import Task

SEED = "; new weights, such as a head, are random: call transformers.set_seed first"
TRAINER = "trainer"  # the name of data and of a model that a Trainer of the user's file holds
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
    """Return the object and the table `[model]`. A pair is a module and its loss."""
    if isinstance(model, tuple) and len(model) == 2 and loss is None:
        model, loss = model
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


def are_trainers(value: Any) -> bool:
    """Return whether an object is a Trainer of transformers, or a dict of Trainers and functions that make them."""
    if isinstance(value, Mapping):
        return bool(value) and all(are_trainers(each) or inspect.isfunction(each) for each in value.values())
    return any((each.__module__, each.__name__) == ("transformers.trainer", "Trainer") for each in type(value).__mro__)


def tell_tokenizers(held: Iterable[Given], model: Any) -> None:
    """Tell the tokenizers of the data which model they are for: their limits are those of the model."""
    for given in held:
        if hasattr(given.value, "all_special_ids"):
            given.config = getattr(getattr(model, "base_model", None), "config", None) or getattr(model, "config", None)


@dataclass(frozen=True)
class _Named:
    """An object of the user's own code, with what it was handed over as."""

    value: Any
    held: tuple[Given, ...]
    table: Mapping[str, Any]
    splitting: Mapping[str, Any] | None = None


_NAMED: dict[tuple[str, Reference], _Named] = {}  # keeps what was handed over


def read_named_objects(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load the objects that `[data]` and `[model]` name. This runs the user's own code.

    Args:
        raw: A config as nested dicts. Paths of own files are absolute.

    Returns:
        The config in which such tables are those that `fit` makes of the objects, with the split that the data says if
        the config says none; and the tables as they were.

    Raises:
        CodeError: If the code has no such object.
        OptionError: If the object is no data or no model.
    """
    found = {what: named for what in ("data", "model") if (named := _named_object(what, raw.get(what)))}
    if "data" in found:
        tell_tokenizers(found["data"].held, found["model"].value if "model" in found else None)
    read = dict(raw)
    for what, named in found.items():
        own = {key: value for key, value in raw[what].items() if key != "name"}
        read[what] = {**(as_long_as_taken(named.table) if what == "data" else named.table), **own}
        if named.splitting is not None:
            read.setdefault("split", named.splitting)
    return read, {what: dict(raw[what]) for what in found}


def load_named_objects(objects: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
    """Load the objects of a config in this process, if another one has read it.

    Args:
        objects: The tables that name them, as they are written.
        tables: The tables that the other process has made of them.

    Raises:
        CodeError: If they are others here.
    """
    read, _ = read_named_objects(objects)
    for what, table in objects.items():
        if read[what].get("path") != tables[what].get("path"):
            raise CodeError(
                f"{what}.name is {format_value(table['name'])}, which is another object each time its file is loaded; "
                "draw what is random with a seed"
            )


def _named_object(what: str, table: Any) -> _Named | None:
    """Return the object that a table names; None for a function, a name of partita, and no name."""
    name = table.get("name") if isinstance(table, Mapping) else None
    reference = find_reference(what, name) if isinstance(name, str) else None
    if reference is None:
        return None
    with _seeded():
        value = load_object(reference)
    if are_trainers(value):
        return _Named(value, (), {"name": TRAINER, "source": str(reference)})
    if callable(value) and not hasattr(value, "state_dict"):
        return None
    known = _NAMED.get((what, reference))
    if known is None or known.value is not value:
        try:
            made = hand_over_data(value) if what == "data" else hand_over_model_of(value)
        except ValueError as error:
            raise OptionError(f"{what}.name is {format_value(name)}: {error}") from error
        known = _NAMED[what, reference] = _Named(value, *made)
    return known


@contextmanager
def _seeded() -> Iterator[None]:
    """Let a file that is loaded draw the same weights at all parties, such as those of a new head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def read_python_file(path: Path) -> dict[str, Any]:
    """Return the config that a file hands to `fit`, with its data and its model by their names in the file.

    Raises:
        CodeError: If the file cannot be loaded, or does not call `fit`, `patch` or `federate` exactly once.
        OptionError: If the function is given an object that is no variable of the file.
    """
    reference = Reference(os.path.abspath(path), "")
    with _seeded():
        call = read_fit_call(Path(reference.source))
    variables, raw = vars(load_module(reference)), dict(call.config)
    for what, value in call.objects.items():
        if any(map(is_given, raw[what].values())):
            name = next((name for name, each in variables.items() if name[0] != "_" and _is_same(each, value)), None)
            if name is None:
                shown = "a pair of model and loss" if isinstance(value, tuple) else f"the {what}"
                shown = "Trainers" if are_trainers(value) else shown
                raise OptionError(
                    f"{call.function.__name__} gets {shown} under no name of {path}, so no other process can find it; "
                    "give it a name at the top level of the file"
                )
            own = {key: each for key, each in raw[what].items() if key not in ("name", "path", "source")}
            kept = own if what == "model" or raw[what]["name"] == TRAINER else {}
            raw[what] = {"name": f"{reference.source}:{name}", **kept}
    return raw


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two objects are one, or the same data with another split."""
    if isinstance(one, DataSource) and isinstance(other, DataSource):
        return one.held == other.held and one.reading == other.reading
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(operator.is_, one, other))
    return one is other


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
