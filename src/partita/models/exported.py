"""Load an exported folder: a model of transformers, an adapter of PEFT, or prompts for a dual encoder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import as_file, files
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from partita.core.model import Model, Output
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.models import ModelError
from partita.models.from_task import processor_of
from partita.models.functional import FunctionalModel, without_logs
from partita.models.hugging_face import from_module
from partita.models.loading import config_for
from partita.models.pretrained import pretrained
from partita.tasks import TaskInfo, TaskKind

WEIGHTS = "adapter_model.safetensors"


class Prompted(Model):
    """A dual encoder with prompts, by the loader that is written with them. It has no parameters to train."""

    def __init__(self, module: torch.nn.Module, kind: TaskKind) -> None:
        self.name, self.module, self.kind = "prompts", module, kind
        self.initial = {"device": torch.zeros(0)}  # says where to evaluate
        self.tags: Mapping[str, frozenset[str]] = {"device": frozenset()}

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        return Output(self.module(inputs["pixel_values"]))

    def losses(self, out: Output, targets: torch.Tensor) -> torch.Tensor:
        return self.kind.loss(out.logits, targets)

    def to(self, device: torch.device) -> None:
        self.module.to(device)
        self.initial["device"] = self.initial["device"].to(device)


def load_exported(
    folder: Path,
    form: Literal["model", "adapter", "prompts"],
    task: TaskInfo,
    options: Mapping[str, Any],
    base: str | None = None,
) -> Model:
    """Load the model of an exported folder. Code in the folder is not run.

    Args:
        folder: The folder.
        form: What it holds.
        task: The task, with the model's labels.
        options: The options of `[model]` that a reader needs.
        base: Folder or Hub id of the model under an adapter or prompts. Default: the one that the folder names.

    Raises:
        ModelError: If it cannot be loaded, or its labels are not those of the task.
    """
    if form == "prompts":
        return Prompted(_prompts(folder, base, task.classes), task.kind)
    chosen = {key: options[key] for key in ("dtype", "prompt") if key in options}
    if form == "model":
        if "prompt" not in chosen:
            _check_labels(folder, task)
        return pretrained(task, Key(0), path=str(folder), **chosen)
    return _adapted(folder, task, base, chosen.get("dtype"))


def adapter_base(folder: Path) -> str:
    """Return the folder or Hub id of the model under an adapter."""
    return str(json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"])


def _check_labels(folder: Path, task: TaskInfo) -> None:
    if task.kind.outputs != "classes":
        return
    config = json.loads((folder / "config.json").read_text())
    names = [name for _, name in sorted((int(place), name) for place, name in config.get("id2label", {}).items())]
    if names != list(task.classes):
        raise ModelError(
            f"the labels in {folder / 'config.json'} are not those in its partita.json; export the run again"
        )


def _adapted(folder: Path, task: TaskInfo, base: str | None, dtype: str | None) -> FunctionalModel:
    from peft import PeftModel

    if not (folder / WEIGHTS).is_file():  # PEFT would look for a pickle, or on the Hub
        raise ModelError(f"{folder} has no {WEIGHTS}; export the run again")
    path = base or adapter_base(folder)
    config = config_for(path, task)
    half = torch.bfloat16 if dtype == "bfloat16" else None
    load: Any = getattr(transformers, task.kind.auto_class).from_pretrained
    with without_logs():
        module = load(
            path,
            config=config,
            dtype=half or torch.float32,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
            use_safetensors=True,  # other formats are pickles
        )
        joined: Any = PeftModel.from_pretrained(module, str(folder)).merge_and_unload()
    return from_module(config.model_type, joined, kind=task.kind, dtype=half, processor=processor_of(task))


def _prompts(folder: Path, towers: str | None, classes: Sequence[str]) -> torch.nn.Module:
    with as_file(files("partita").joinpath("templates", "load_prompts.py")) as file:
        spec = spec_from_file_location("partita_load_prompts", file)
        assert spec is not None
        assert spec.loader is not None
        loader = module_from_spec(spec)
        spec.loader.exec_module(loader)
    try:
        with without_logs():
            module: torch.nn.Module = loader.load_prompts(folder, towers)
    except OSError as error:
        raise ModelError(f"the towers of the prompts in {folder} cannot be loaded; name them with --base") from error
    if list(module.classes) != list(classes):  # type: ignore[arg-type]
        raise ModelError(f"the classes in {folder / 'prompts.json'} are not those in its partita.json; export it again")
    return module
