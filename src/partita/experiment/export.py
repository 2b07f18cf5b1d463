"""Export the model of a run: a folder that loads without partita, with a model card and `partita.json`."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import torch

from partita.core import serialization
from partita.core.given import origin
from partita.core.model import Model
from partita.core.personal_copy import PersonalCopyModel
from partita.core.tensors import Tensors
from partita.experiment.exported import Export, ExportError, Form, describe_export, write_export
from partita.experiment.model_card import write_card
from partita.experiment.recorded_model import RecordedModel
from partita.models.functional import FunctionalModel, without_logs
from partita.models.loading import tokenizer_of
from partita.models.peft_adapters import AdaptedModel
from partita.models.prompts.export import has_prompts, save_prompts
from partita.models.trained import CopiesModule
from partita.storage.safe_text import path_component

SHARED, CLIENTS, DIFFERENCE, INDEX = "shared", "clients", "difference.safetensors", "clients.json"
LOADER = "load_client.py"


def export_model(
    recorded: RecordedModel, folder: Path, client: str | None = None, merge: bool = False, place: str = ""
) -> Export:
    """Write the server's model, or a client's own, as a folder that loads without partita.

    Args:
        recorded: The model of a run.
        folder: The folder to write. It must not exist.
        client: The client whose own model to write. Default: the server's.
        merge: Write a folder that needs no other: with the adapter added to its base, or the towers of prompts.
        place: Name of the folder in its card. Default: its own.

    Returns:
        What `partita.json` in the folder says.

    Raises:
        ExportError: If the folder exists, or the model cannot be written like this.
        RunError: If there is no such client.
    """
    refuse_existing(folder)
    form = form_of(recorded, merge)
    params = recorded.params(client)  # before anything is written
    with _complete(folder) as part:
        export = _write(recorded, params, part, form, merge, client)
        write_card(part, export, recorded, place or folder.name)
    return export


def export_clients(recorded: RecordedModel, folder: Path, merge: bool = False, place: str = "") -> Export:
    """Write the shared model, and for each client what differs from it in the client's own.

    Args:
        recorded: The model of a run.
        folder: The folder to write. It must not exist.
        merge: Write folders that need no other: with the adapter added to its base, or the towers of prompts.
        place: Name of the folder in its card. Default: its own.

    Returns:
        What `partita.json` of the shared model says.

    Raises:
        ExportError: If the folder exists, or the model cannot be written like this.
    """
    refuse_existing(folder)
    form, names = form_of(recorded, merge), recorded.experiment.federation.clients
    with _complete(folder) as part:
        export = _write(recorded, recorded.saved.server.params, part / SHARED, form, merge)
        write_card(part / SHARED, export, recorded, f"{place or folder.name}/{SHARED}")
        shared, index = _tensors(part / SHARED), {}
        for client in names:
            index[client] = f"{CLIENTS}/{path_component(client)}"
            own = part / index[client]
            own.mkdir(parents=True)
            with tempfile.TemporaryDirectory(dir=part) as whole:
                about = _write(recorded, recorded.params(client), Path(whole) / "model", form, False, client)
                values = _tensors(Path(whole) / "model")
            if values.keys() != shared.keys():
                odd = min(values.keys() ^ shared.keys())
                raise ExportError(f"'{odd}' is in one of the models only; export client '{client}' alone with --client")
            changed = {name: value for name, value in values.items() if not _equal(value, shared[name])}
            (own / DIFFERENCE).write_bytes(serialization.save(changed, {"format": "pt"}))
            write_export(own, about)
            write_card(own, about, recorded, "FOLDER")
        text = json.dumps({"format": 1, "shared": SHARED, "clients": index}, indent=1) + "\n"
        (part / INDEX).write_text(text, encoding="utf-8")
        _copy_template(LOADER, part)
        write_card(part, export, recorded, f"{place or folder.name}/{SHARED}", len(names))
    return export


def refuse_existing(folder: Path) -> None:
    """Raise ExportError if there is something at the path of a folder to write."""
    if folder.exists() or folder.is_symlink():
        raise ExportError(f"{folder} exists already; move it away, or name another folder with --to")


def form_of(recorded: RecordedModel, merge: bool = False) -> Form:
    """Return what an exported folder will hold.

    Raises:
        ExportError: If the model cannot be exported, or not like this.
    """
    model, config = without_copies(recorded.experiment.model, {})[0], recorded.experiment.config
    if isinstance(model, FunctionalModel) and model.only_here:
        raise ExportError(
            f"{recorded.folder} cannot be exported: {model.only_here}; predict with 'partita predict', or train with "
            "model.pooling = 'model'"
        )
    if merge and not isinstance(model, AdaptedModel) and not has_prompts(model):
        raise ExportError(
            f"{recorded.folder} trained neither an adapter nor prompts, so there is nothing to merge; leave --merge out"
        )
    if isinstance(model, AdaptedModel):
        if merge and config.model.get("quantize"):
            raise ExportError(
                f"model.quantize is '{config.model['quantize']}', and an adapter cannot be added to quantized weights; "
                "leave --merge out, and load the adapter on the base as it is"
            )
        if not merge and not origin(config.model.get("path")):
            raise ExportError(
                "the base of the adapter has random weights, which are in no file; write a whole model with --merge"
            )
        return "model" if merge else "adapter"
    if isinstance(model, FunctionalModel):
        return "model"
    if has_prompts(model):
        return "prompts"
    if isinstance(model, CopiesModule):
        raise ExportError(
            f"{model.name} belongs to a Trainer; save the copy that partita.load_run(FOLDER).model() returns"
        )
    raise ExportError(f"{model.name} is no model of transformers, so there is nothing to export")


def check_publishable(recorded: RecordedModel, merge: bool, own_models: bool) -> None:
    """Check that others may have an exported folder, and can load it.

    Args:
        recorded: The model of a run.
        merge: Whether the folder will need no other.
        own_models: Whether it will hold clients' own models.

    Raises:
        ExportError: If the folder would need a local one, or hold what the run's guarantee does not cover.
    """
    config, form = recorded.experiment.config, form_of(recorded, merge)
    if own_models and config.privacy is not None and config.privacy.unit == "client":
        raise ExportError(
            "privacy.unit is 'client', and the guarantee does not cover clients' own parameters; push the shared model"
        )
    if form != "model" and not merge and Path(origin(config.model.get("path"))).is_dir():
        raise ExportError(
            f"the {form} would need a model in a local folder, which others do not "
            "have; push a folder that needs no other with --merge"
        )


def _write(
    recorded: RecordedModel, params: Tensors, folder: Path, form: Form, merge: bool, client: str | None = None
) -> Export:
    """Write a model and `partita.json`."""
    experiment = recorded.experiment
    config, task = experiment.config, experiment.federation.task
    model, params = without_copies(experiment.model, params)
    folder.mkdir(parents=True, exist_ok=True)
    with without_logs():
        if form == "prompts":
            source = "" if merge else _source(origin(config.model.get("path")))
            save_prompts(model, params, folder, task.classes, source, config.method["name"])
        elif form == "model" and isinstance(model, AdaptedModel):
            model.save_merged(params, folder)
        else:
            assert isinstance(model, FunctionalModel)
            model.save_pretrained(params, folder)
        if config.model.get("prompt"):
            tokenizer_of(config.model["path"]).save_pretrained(folder)  # of the class texts
    export = describe_export(experiment, form, recorded.saved.done, recorded.identity, client, experiment.base_digest)
    write_export(folder, export)
    return export


def _source(path: str | None) -> str:
    """Return where a loader finds a model: its id on the Hub, or the folder in which it lies now."""
    return str(Path(path).resolve()) if path and Path(path).is_dir() else path or ""


def without_copies(model: Model, params: Tensors) -> tuple[Model, Tensors]:
    """Return the model without personal copies. The parameters of a client hold its own values already."""
    while isinstance(model, PersonalCopyModel):
        params = {name: value for name, value in params.items() if name in model.base.initial}
        model = model.base
    return model, params


def _tensors(folder: Path) -> Tensors:
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= serialization.load(path.read_bytes())
    return found


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


@contextmanager
def _complete(folder: Path) -> Iterator[Path]:
    """Give a folder to write, which gets its name only when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name[:40]}.", suffix=".part", dir=folder.parent))
    try:
        yield part
        part.chmod(0o755)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _copy_template(name: str, folder: Path) -> None:
    text = files("partita").joinpath(f"templates/{name}").read_text(encoding="utf-8")
    (folder / name).write_text(text, encoding="utf-8")
