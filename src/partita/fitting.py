"""Run an experiment on objects: a model, a data set and a method, with the config that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.core.options import OptionError, closest_match, format_value
from partita.core.own_code import end_at_fit
from partita.core.registry import options_by_name
from partita.runs import Fitted, follow_run

if TYPE_CHECKING:
    from partita.core.given import Given
    from partita.core.method import Method
    from partita.data.objects import DataSource
    from partita.data.task import Task

TABLES = (
    "training",
    "federation",
    "engine",
    "evaluate",
    "checkpoint",
    "track",
    "privacy",
    "secure_aggregation",
    "stop",
    "sampling",
    "split",
)


def fit(
    model: Any,
    data: DataSource | Task | Any,
    method: Method | Mapping[str, Any] | str = "fedavg",
    *,
    rounds: int = 20,
    seed: int = 0,
    folder: Path | str | None = None,
    label: str | None = None,
    loss: Any = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Fitted:
    """Train a model on data that is split among clients, and record the run, as `partita run` does with a config.

    The model that is handed over does not change; `Fitted.model` returns a trained copy. The run's config names the
    model and the data by digests, and the run is resumed when the same objects are handed over again.

    Args:
        model: A module of transformers, also with an adapter of PEFT, which then trains and travels; a
            `torch.nn.Module`, or a pair of one and its loss; a folder or an id on the Hub; or the table `[model]` as a
            dict.
        data: What `from_dataset` returns, with its split; a `Task`; data that `from_dataset` reads without further
            words; or the table `[data]` as a dict.
        method: The name of a method, `partita.method(name, option=...)`, or the table `[method]` as a dict.
        rounds: The number of rounds.
        seed: The seed of all random draws.
        folder: The run folder. Default: runs/LABEL-seed-N.
        label: The name of the run in tables. Default: the method with its options.
        loss: For a `torch.nn.Module`: a function of its outputs and the targets that returns one loss per example.
            Default: the loss of the task.
        resume: If the folder holds this very run, continue it instead of failing.
        overwrite: Delete the run in the folder first.
        progress: Whether to show the progress on a terminal or in a notebook.
        **settings: Keys of `[training]` such as `lr=2e-5`, keys of `[model]` such as `adapter={"rank": 8}`, and other
            tables, such as `privacy={"epsilon": 8, "delta": 1e-5}` or `split={"name": "iid", "clients": 5}`.

    Raises:
        ValueError: If an object or a setting is invalid, or they do not fit each other. Nothing has been trained then.
    """
    from partita.experiment.config import parse

    handed, raw = config_of(model, data, method, loss, **settings)
    raw |= {"rounds": rounds, "seed": seed, **({} if label is None else {"label": label})}
    end_at_fit(fit, raw, {"data": data, "model": model if loss is None else (model, loss)})
    config = parse(raw)
    place = follow_run(config, folder, resume=resume, overwrite=overwrite, progress=progress)
    return Fitted.read(place, handed)


def config_of(
    model: Any, data: Any, method: Any, loss: Any = None, **settings: Any
) -> tuple[tuple[Given, ...], dict[str, Any]]:
    """Return the objects that are handed over, and the config that they make, as nested dicts."""
    from partita.data.objects import as_long_as_taken
    from partita.experiment.handing_over import hand_over_data, hand_over_model_of, tell_tokenizers

    held_data, reading, splitting = hand_over_data(data)
    held_model, building = hand_over_model_of(model, loss)
    tell_tokenizers(held_data, model)
    raw: dict[str, Any] = {"method": method_table(method), "data": as_long_as_taken(reading)}
    if splitting is not None:
        raw["split"] = splitting
    raw |= _sorted_settings(settings, building)
    raw["model"] = {**building, **raw.get("model", {})}
    if "split" not in raw:
        raise OptionError(
            "nothing says which rows a client has; split the data: data.by('column'), data.split('iid', clients=10), "
            "or a dict with a data set for each client"
        )
    return (*held_data, *held_model), raw


def method_table(method: Any) -> dict[str, Any]:
    """Return the table `[method]` of a method."""
    if isinstance(method, str):
        return {"name": method}
    if isinstance(method, Mapping):
        return dict(method)
    if not getattr(method, "recipe", None):
        raise OptionError(
            "the method does not say by which name it can be built again, so a run of it cannot be recorded; give "
            "partita.method(name, ...), 'one+other' for a composition, or 'file.py:function' for your own"
        )
    return dict(method.recipe)


def _sorted_settings(settings: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Put each setting into its table."""
    from partita.core.settings import Training

    of_training = {each.name for each in fields(Training)}
    of_model = {"adapter", *(options_by_name("model", model["name"]) if "name" in model else ())}
    raw: dict[str, Any] = {}
    for name, value in settings.items():
        if name in TABLES:
            raw[name] = {**raw.get(name, {}), **_as_table(name, value)}
        elif name in of_training:
            raw["training"] = {**raw.get("training", {}), name: value}
        elif name in of_model:
            raw["model"] = {**raw.get("model", {}), name: value}
        else:
            raise OptionError(f"fit has no setting '{name}'; {closest_match(name, [*TABLES, *of_training, *of_model])}")
    return raw


def _as_table(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if not is_dataclass(value) or isinstance(value, type):
        raise OptionError(f"{name} is {format_value(value)}; it must be a dict with the keys of [{name}]")
    return {key: each for key, each in asdict(value).items() if each is not None}
