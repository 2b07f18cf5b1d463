"""`partita.json`, which describes an exported model: what it predicts, how its data is read, and where it comes from.

`partita evaluate` and `partita predict` read it. It names no path of the machine that wrote it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from partita import data
from partita.core.given import origin
from partita.core.options import closest_match
from partita.experiment.config_code import portable
from partita.experiment.experiment import Experiment
from partita.record.file_names import EXPORTED
from partita.storage import atomic_files
from partita.tasks import KINDS

FORMAT = 1  # raised when a reader of the old format would misunderstand the new one
MAX_BYTES = 2**24
# model: a folder of transformers. adapter: one of PEFT. prompts: prompts for a frozen dual encoder, with their loader.
Form = Literal["model", "adapter", "prompts"]
# Keys of [data] that say where the rows of the run came from, not how a row is read.
OF_THE_RUN = ("path", "config", "test", "limit", "memory", "shots", "new_classes", "tokenizer", "pack")
REMEDY = "export the run again"


class ExportError(ValueError):
    """A folder holds no exported model, or a model cannot be exported as asked."""


@dataclass(frozen=True)
class Images:
    """How an image becomes pixel values: resized to a square, divided by 255, then normalized."""

    size: int  # side in pixels
    channels: int
    mean: tuple[float, ...] = ()  # per channel, or one for all; empty if unknown
    std: tuple[float, ...] = ()


@dataclass(frozen=True)
class Base:
    """The model that the run started from.

    Attributes:
        name: Hub id, or the name of a local folder without the folders above it; "" if the run started from random
            weights.
        on_hub: Whether the name is a Hub id.
        digest: SHA-256 of its weights that were frozen, as in environment.json of the run; "" if none were.
    """

    name: str = ""
    on_hub: bool = False
    digest: str = ""


@dataclass(frozen=True)
class Export:
    """What `partita.json` says about an exported folder.

    Attributes:
        form: What the folder holds.
        kind: Name of the task's kind, a key of `partita.tasks.KINDS`.
        labels: Names of the outputs, in the order of the logits; empty for language models.
        metrics: Names of the task's metrics.
        primary: The metric that a run is judged by.
        data: The keys of the run's [data] that say how a row is read, with its "name"; empty if the user's own code
            reads the data.
        model: The keys of the run's [model] that a reader needs: "name", "dtype", and "prompt" or "template" with
            their class texts.
        base: The model that the run started from.
        method: Name of the method.
        round: Number of finished rounds.
        run: Identity of the run: a digest of the files written before its first round.
        images: How images are read; None for other inputs.
        client: The client whose own model this is; None for the server's.
        privacy_unit: "example", "group" or "client" if the run was private; None if it was not.
    """

    form: Form
    kind: str
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    primary: str
    data: Mapping[str, Any]
    model: Mapping[str, Any]
    base: Base
    method: str
    round: int
    run: str
    images: Images | None = None
    client: str | None = None
    privacy_unit: Literal["example", "group", "client"] | None = None
    format: int = field(default=FORMAT, kw_only=True)


def describe_export(
    experiment: Experiment, form: Form, round: int, run: str, client: str | None = None, base_digest: str = ""
) -> Export:
    """Describe an exported model.

    Args:
        experiment: The run's experiment.
        form: What the folder holds.
        round: Number of finished rounds.
        run: Identity of the run.
        client: The client whose own model it is.
        base_digest: SHA-256 of the frozen weights.
    """
    config, task = experiment.config, experiment.federation.task
    evaluator = experiment.evaluator
    images = None
    if task.kind.inputs == "image":
        images = Images(task.size, task.channels, *(task.normalization or ((), ())))
    known = config.data["name"] in data.INDEX
    reading = {key: value for key, value in config.data.items() if known and key not in OF_THE_RUN}
    if images is not None and "size" in config.data:
        reading["size"] = task.size  # the config may leave it to the images
    named = portable({"method": config.method, "model": config.model})  # own code without its folder
    kept = ("name", "dtype", "prompt", "template")
    return Export(
        form=form,
        kind=task.kind.name,
        labels=task.classes,
        metrics=tuple(metric.name for metric in evaluator.metrics),
        primary=evaluator.primary.name,
        data=reading,
        model={key: named["model"][key] for key in kept if config.model.get(key) is not None},
        base=base_of(config.model, base_digest),
        method=named["method"]["name"],
        round=round,
        run=run,
        images=images,
        client=client,
        privacy_unit=config.privacy.unit if config.privacy else None,
    )


def base_of(model: Mapping[str, Any], digest: str = "") -> Base:
    """Return the base of a table `[model]`: its Hub id, or the last part of its folder's path."""
    path = origin(model.get("path"))
    if not path:
        return Base(digest=digest)
    local = Path(path).is_dir()
    return Base(Path(path).resolve().name if local else path, not local, digest)


def write_export(folder: Path, export: Export) -> None:
    """Write `partita.json` into a folder."""
    atomic_files.write(folder / EXPORTED, (json.dumps(dataclasses.asdict(export), indent=1) + "\n").encode())


def holds_export(folder: Path) -> bool:
    """Return whether a folder says that it holds an exported model."""
    return (folder / EXPORTED).is_file()


def read_export(folder: Path) -> Export:
    """Read `partita.json` of an exported folder. It is checked key by key, because the folder may come from anyone.

    Raises:
        ExportError: If there is none, or it is not as partita writes it.
    """
    path = folder / EXPORTED
    if not path.is_file():
        raise ExportError(f"{folder} has no {EXPORTED}; give a folder that 'partita export' wrote")
    try:
        raw = atomic_files.parse_json(atomic_files.read(path, MAX_BYTES), str(path))
    except (atomic_files.DamageError, atomic_files.LinkError) as error:
        raise ExportError(str(error)) from error
    _require(isinstance(raw, dict), path, "is not a table")
    found = raw.get("format")
    _require(type(found) is int, path, "has no format number")
    if found != FORMAT:
        raise ExportError(f"{path} has format {found}, and this version of partita reads {FORMAT}; {REMEDY} with it")
    for key, kind in _KINDS.items():
        _require(key in raw, path, f"has no '{key}'")
        _require(_fits(raw[key], kind), path, f"has a wrong value of '{key}'")
    if unknown := sorted(raw.keys() - _KINDS.keys()):
        raise ExportError(f"{path} has the unknown key '{unknown[0]}'; {closest_match(unknown[0], _KINDS)}")
    _require(raw["form"] in get_args(Form), path, f"has the unknown form '{raw['form']}'")
    _require(raw["kind"] in KINDS, path, f"names the unknown kind '{raw['kind']}'")
    _require(raw["primary"] in raw["metrics"], path, "names a primary metric that is not among its metrics")
    _require(len({*raw["labels"]}) == len(raw["labels"]), path, "names a label twice")
    _require(not raw["data"] or raw["data"].get("name") in data.INDEX, path, "names an unknown reader of data")
    _require(raw["privacy_unit"] in (None, "example", "group", "client"), path, "names an unknown unit of privacy")
    images = raw["images"]
    return Export(
        **{
            **raw,
            "labels": tuple(raw["labels"]),
            "metrics": tuple(raw["metrics"]),
            "data": _frozen(raw["data"]),
            "model": _frozen(raw["model"]),
            "base": _table(Base, raw["base"], path, "base"),
            "images": None if images is None else _table(Images, images, path, "images"),
        }
    )


_KINDS: dict[str, Any] = {
    "form": str,
    "kind": str,
    "labels": [str],
    "metrics": [str],
    "primary": str,
    "data": dict,
    "model": dict,
    "base": dict,
    "method": str,
    "round": int,
    "run": str,
    "images": (dict, None),
    "client": (str, None),
    "privacy_unit": (str, None),
    "format": int,
}
_TABLES: dict[type, dict[str, Any]] = {
    Base: {"name": str, "on_hub": bool, "digest": str},
    Images: {"size": int, "channels": int, "mean": [float], "std": [float]},
}


def _fits(value: object, kind: Any) -> bool:
    if isinstance(kind, tuple):
        return any(value is None if each is None else _fits(value, each) for each in kind)
    if isinstance(kind, list):
        return isinstance(value, list) and all(_fits(item, kind[0]) for item in value)
    if kind is float:
        return type(value) in (int, float)
    if kind is int:
        return type(value) is int and value >= 0
    return type(value) is kind


def _table(table: type, raw: Mapping[str, Any], path: Path, key: str) -> Any:
    kinds = _TABLES[table]
    _require(raw.keys() == kinds.keys(), path, f"has wrong keys in '{key}'")
    for name, kind in kinds.items():
        _require(_fits(raw[name], kind), path, f"has a wrong value of '{key}.{name}'")
    return table(**_frozen(raw))


def _frozen(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}


def _require(holds: bool, path: Path, fault: str) -> None:
    if not holds:
        raise ExportError(f"{path} {fault}; {REMEDY}")
