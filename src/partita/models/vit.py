"""Vision Transformers of transformers, from scratch or from a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, ViTConfig, ViTForImageClassification

from partita.core.rng import Key
from partita.models import ImageTask, ModelError
from partita.models.adapter import Adapted, adapt, quiet

HEAD = "classifier."
LEFT_BEHIND = re.compile(r"(vit\.)?pooler\..+")  # of a checkpoint: belongs to the task it was pretrained on


def vit(
    task: ImageTask,
    key: Key,
    *,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    mlp_ratio: int = 2,
    patch: int = 2,
    frozen: tuple[str, ...] = (),
) -> Adapted:
    """A Vision Transformer from scratch. `frozen` gives tags or names of what never trains nor travels."""
    _check_task(task)
    numbers = {"layers": layers, "width": width, "heads": heads, "mlp_ratio": mlp_ratio, "patch": patch}
    for option, number in numbers.items():
        if number < 1:
            raise ModelError(f"{option} is {number}; it must be at least 1")
    if width % heads:
        fit = -(-width // heads) * heads
        raise ModelError(f"width {width} is not divisible by {heads} heads; use a width of {fit}")
    if task.size % patch:
        fits = ", ".join(str(side) for side in range(1, task.size + 1) if task.size % side == 0)
        raise ModelError(f"images of size {task.size} do not divide into patches of {patch}; use a patch of {fits}")
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=width * mlp_ratio,
        image_size=task.size,
        patch_size=patch,
        num_channels=task.channels,
    )
    _label(config, task)
    with _drawing_from(key):
        module = ViTForImageClassification(config)
    return adapt("vit", module, frozen)


def pretrained(
    task: ImageTask, key: Key, *, path: str, fresh_head: bool = False, frozen: tuple[str, ...] = ()
) -> Adapted:
    """A ViT from a folder or the Hugging Face Hub. Its head is kept if it has as many classes as the task."""
    _check_task(task)
    config = _config(path)
    _check_images(path, config, task)
    _label(config, task)
    load: Callable[..., Any] = ViTForImageClassification.from_pretrained
    with quiet(), _drawing_from(key):
        try:
            module, report = load(
                path, config=config, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
            )
        except OSError as error:
            raise ModelError(f"'{path}' has no weights that can be loaded: {_first_line(error)}") from error
    mismatched = {name for name, *_ in report["mismatched_keys"]}
    lacking = {*report["missing_keys"], *mismatched}
    _refuse(path, "lacks", {name for name in lacking - mismatched if not name.startswith(HEAD)})
    _refuse(path, "has in another shape", {name for name in mismatched if not name.startswith(HEAD)})
    _refuse(path, "has, but this model has not", {n for n in report["unexpected_keys"] if not LEFT_BEHIND.fullmatch(n)})
    if lacking or fresh_head:
        # Not left to transformers, whose draw would depend on what else it fills in.
        nn.init.normal_(module.classifier.weight, std=config.initializer_range, generator=(key / "head").generator())
        nn.init.zeros_(module.classifier.bias)
    return adapt("vit", module, frozen)


def _check_task(task: ImageTask) -> None:
    if not (task.channels and task.size):
        raise ModelError("the task has no square images, which a vit needs; choose a task of images or another model")


def _label(config: ViTConfig, task: ImageTask) -> None:
    config.id2label = dict(enumerate(task.classes))
    config.label2id = {label: index for index, label in enumerate(task.classes)}


@contextmanager
def _drawing_from(key: Key) -> Iterator[None]:
    """Modules draw from torch's global CPU generator: seed it for a while. torch.manual_seed would reseed GPUs too."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key.seed())
        yield


def _config(path: str) -> ViTConfig:
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise ModelError(f"the folder '{path}' has no config.json; give one that save_pretrained has written")
    elif not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path):
        raise ModelError(f"there is no folder '{path}'; give one that save_pretrained has written, or a Hub id")
    try:
        with quiet():
            config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"'{path}' is no folder here and cannot be had from the Hugging Face Hub: {_first_line(error)}"
            if not Path(path).is_dir()
            else f"the config.json in '{path}' cannot be read: {_first_line(error)}"
        ) from error
    if not isinstance(config, ViTConfig):
        raise ModelError(f"'{path}' holds a model of type '{config.model_type}'; give a checkpoint of a 'vit'")
    return config


def _check_images(path: str, config: ViTConfig, task: ImageTask) -> None:
    size = config.image_size
    if size not in (task.size, [task.size] * 2, (task.size,) * 2):
        raise ModelError(
            f"'{path}' takes images of size {size}, but the task's are of size {task.size}; "
            f"resize the task's images to {size}"
        )
    if config.num_channels != task.channels:
        raise ModelError(
            f"'{path}' takes images of {config.num_channels} channels, but the task's have {task.channels}; "
            f"give the task's images {config.num_channels} channels"
        )


def _refuse(path: str, fault: str, names: set[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ModelError(f"'{path}' {fault}: {shown}; give a checkpoint of a ViT, with or without a head")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
